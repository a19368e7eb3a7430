// Gathers and scatters of one group by the GPU's copy engines: the work of each stream, and the events between them.
//
// Calls do not wait on the host, and all but `offer` may be captured in a CUDA graph. Steps are those of `steps.h`:
// - `out`, a stream of our own, copies shards to this rank's stage and blocks to slots of the peers;
// - more streams, `in`, copy the peers' shards; peers are distributed over these streams in turn;
// - the caller's stream waits for shards, one by one, for the blocks of all, and passes the gates at the end.
// For a kernel that waits for shards itself, the caller's stream also stages this rank's shard, before the kernel.
// Gathers pull and scatters push, so that bytes are moved once. A shard or a sum is pulled to where the matmul reads
// it; pushed, it would need another copy out of a slot. A block is pushed from where the matmul has stored it, and is
// summed in its slot.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "copy_engine/steps.h"
#include "copy_engine/watchdog.h"
#include "driver/driver.h"

namespace fused_tp::copy_engine {

using driver::SharedEvent;

class Workspace {
 public:
  // `addresses`: those of the ranks' workspaces, each of Layout::bytes() or more. No rank may begin a call before all
  // ranks have created theirs. `streams`: the watchdog's, which others may use for copies that wait for nothing; `out`;
  // those of `in`. If empty, the workspace creates all of them, `in` with one per peer, but no more than kMostIn.
  Workspace(std::shared_ptr<const Driver> driver, int device, int rank, std::vector<DeviceAddress> addresses,
            int64_t gather_bytes, int64_t scatter_bytes, std::vector<Stream> streams = {});
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  const Layout& layout() const { return protocol_.layout(); }
  int rank() const { return protocol_.rank(); }
  StreamWatchdog& watchdog() { return watchdog_; }
  bool forked() const { return driver_->forked(); }
  // True once all enqueued work has ended, false if it has not after that many seconds. Waits on the host.
  bool quiet(double seconds);

  // One call of an op, from its first message to its gates. All ranks make the same calls in the same order, and in
  // each the same messages. A call may begin and end inside another.
  struct Call {
    uint64_t number = 0;
    std::vector<SharedEvent> arrived;  // of the last gather, by rank
    bool sent = false;
    int offered = -1;  // channel of a gather that a kernel waits for
  };

  Call begin(Op op, Stream stream, double timeout_seconds);
  // Starts a gather: `shard` of this rank, and the destinations `to` of the peers' shards (this rank's own is unused).
  // The caller may not touch any of this memory until the end of the call.
  void gather(Call& call, Stream stream, Memory shard, const std::vector<Memory>& to);
  void wait_for(const Call& call, Stream stream, int peer);
  // The same for a kernel that waits itself, the next in `stream`: it polls the words Layout::arrived of the returned
  // channel. Not in a capture, as CUDA does not guarantee that branches of a graph run concurrently. `to` may have a
  // destination for this rank's shard too. An offer that is repeated with the same memory is launched as two graphs.
  int offer(Call& call, Stream stream, Op op, Memory shard, const std::vector<Memory>& to);
  // The number of a new scatter, for the functions below. Throws std::logic_error if kChannels scatters have begun and
  // not been received yet: their sends would wait for this rank, and this rank for them.
  int scatter();
  // Sends `block` to `peer` once the work enqueued so far in `stream` has finished. The caller may not touch `block`
  // until the end of the call.
  void push(Call& call, Stream stream, int scatter, int peer, Memory block);
  // `stream` continues once the blocks of all peers are in their slots. Call `release` once they may be overwritten.
  void receive(const Call& call, Stream stream, int scatter);
  void release(Stream stream, int scatter);
  // Ends the call. `results`: memory that becomes NaN if the call fails.
  void finish(Call& call, Stream stream, std::vector<Memory> results);

 private:
  template <typename Give>
  void run(Stream stream, Give&& give);
  std::vector<Stream> make_streams();
  void take_turn(Stream stream);
  void fetch(const std::vector<Stream>& streams, int index, uint64_t call, const std::vector<Memory>& to);
  void spread(const std::vector<Stream>& streams);
  void join(const std::vector<Stream>& streams);
  // `capture`: as many streams, of our own, in which the graph is captured.
  template <typename Give>
  void repeat(std::vector<uint64_t> key, const std::vector<Stream>& streams, const std::vector<Stream>& capture,
              Give&& give);
  DeviceAddress address(const Place& place) const;
  SharedEvent record(Stream stream);
  Stream in_of(int peer) const;
  bool passed() const { return watchdog_.told(passed_word(layout().world())) >= last_passage_; }

  std::shared_ptr<const Driver> driver_;
  int device_;
  Protocol protocol_;
  std::vector<DeviceAddress> addresses_;
  driver::EventPool events_;
  std::vector<std::unique_ptr<driver::OwnStream>> made_;
  std::vector<Stream> streams_;  // given or made: the watchdog's, `out`, `in`
  Stream out_;
  std::vector<Stream> in_;
  Steps steps_;
  std::vector<driver::MemoryOp> ops_;
  uint64_t calls_ = 0;
  uint64_t gathers_ = 0;
  uint64_t scatters_ = 0;
  SharedEvent pushed_[kChannels];          // after the last block of a scatter
  bool open_[kChannels] = {};              // scatters that have begun and not yet been received
  bool pulled_ = false, fetched_ = false;  // outside of captures, since `in_` were last ordered
  uint64_t passages_ = 0;
  Stream last_stream_ = nullptr;
  uint64_t last_passage_ = 0;  // outside of captures
  // Graphs of work that is repeated with the same memory, used from the second time on.
  std::map<std::vector<uint64_t>, std::unique_ptr<const driver::Graph>> graphs_;
  StreamWatchdog watchdog_;  // last: it watches the streams
};

}  // namespace fused_tp::copy_engine
