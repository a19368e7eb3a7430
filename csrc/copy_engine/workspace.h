// Gathers and scatters of one group by the GPU's copy engines: which stream does what, and the events between them.
//
// Nothing here waits on the host, and all of it may be captured in a CUDA graph. Steps are those of `steps.h`:
// - `out`, a stream of our own, puts shards into this rank's stage and blocks into slots of the others;
// - some more, `in`, copy the others' shards, each from every so-manieth peer;
// - the caller's stream waits for shards, one by one, for the blocks of all, and passes the gates at the end.
// For a kernel that waits for shards itself the caller's stream also puts the own one into the stage, in front of it.
// Gathers pull and scatters push: each so that bytes are moved once. A shard that is pulled goes where the matmul reads
// it, and so do pulled sums; pushed, both would need another copy out of a slot. A block that is pushed comes from
// where the matmul has put it, and is summed in its slot.
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
  // `addresses`: of the ranks' workspaces, each of Layout::bytes() or more. Ranks may call each other only once all
  // have made theirs. `streams`: the watchdog's, which others may use for copies that wait for nothing; `out`; those of
  // `in`. None: it makes all of them, `in` one for each peer, but no more than kMostIn.
  Workspace(std::shared_ptr<const Driver> driver, int device, int rank, std::vector<DeviceAddress> addresses,
            int64_t gather_bytes, int64_t scatter_bytes, std::vector<Stream> streams = {});
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  const Layout& layout() const { return protocol_.layout(); }
  int rank() const { return protocol_.rank(); }
  StreamWatchdog& watchdog() { return watchdog_; }
  bool forked() const { return driver_->forked(); }
  // True once all that was enqueued has ended, false if it has not after that many seconds. Waits on the host.
  bool quiet(double seconds);

  // One call of an op, from its first message to its gates. All ranks make the same calls in the same order, and in
  // each the same messages. A call may begin and end inside of another.
  struct Call {
    uint64_t number = 0;
    std::vector<SharedEvent> arrived;  // of the last gather, by rank
    bool sent = false;
    int offered = -1;  // channel of a gather that a kernel waits for
  };

  Call begin(Op op, Stream stream, double timeout_seconds);
  // Starts to gather: `shard` of this rank, and where those of the others go (nothing of this rank's own). All of this
  // memory is left alone until the end of the call.
  void gather(Call& call, Stream stream, Memory shard, const std::vector<Memory>& to);
  void wait_for(const Call& call, Stream stream, int peer);
  // The same for a kernel that waits itself, the next in `stream`: the words Layout::arrived of the channel that is
  // returned tell it of shards. Not in a capture, as nothing promises that branches of a graph run at once. `to` has a
  // place for this rank's shard too, or nothing. What is offered again with the same memory is launched as two graphs.
  int offer(Call& call, Stream stream, Op op, Memory shard, const std::vector<Memory>& to);
  // The number of a new scatter, for the following. Throws std::logic_error where kChannels have begun and not yet been
  // received: what they send would wait for this rank, and this rank for that.
  int scatter();
  // What is in `stream` up to here has made the block, which is left alone until the end of the call.
  void push(Call& call, Stream stream, int scatter, int peer, Memory block);
  // `stream` goes on once the blocks of all others are in their slots; `release` once they may be overwritten.
  void receive(const Call& call, Stream stream, int scatter);
  void release(Stream stream, int scatter);
  // The end. `results`: what becomes NaN where the call fails.
  void finish(Call& call, Stream stream, std::vector<Memory> results);

 private:
  template <typename Give>
  void run(Stream stream, Give&& give);
  std::vector<Stream> make_streams();
  void take_turn(Stream stream);
  void fetch(const std::vector<Stream>& streams, int index, uint64_t call, const std::vector<Memory>& to);
  void spread(const std::vector<Stream>& streams);
  void join(const std::vector<Stream>& streams);
  // `capture`: as many streams, of our own, in which the graph is made.
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
  SharedEvent pushed_[kChannels];          // behind the last block of a scatter
  bool open_[kChannels] = {};              // scatters that have begun and not yet been received
  bool pulled_ = false, fetched_ = false;  // outside of captures: since `in_` were last behind each other
  uint64_t passages_ = 0;
  Stream last_stream_ = nullptr;
  uint64_t last_passage_ = 0;  // outside of captures
  // What is done again with the same memory: a graph from the second time on.
  std::map<std::vector<uint64_t>, std::unique_ptr<const driver::Graph>> graphs_;
  StreamWatchdog watchdog_;  // last: it looks after the streams
};

}  // namespace fused_tp::copy_engine
