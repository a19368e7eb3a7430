// Workspace: gathers and scatters of one group by the GPU's copy engines. It enqueues the steps of steps.h in these
// streams and orders the streams by events:
//
// - the send stream copies this rank's shards to its stage, and blocks to its slots at the peers;
// - the pull streams copy the peers' shards; peers are distributed over them round-robin;
// - the caller's stream waits for each peer's shard separately (gather), or for all peers' blocks together (scatter),
//   then for the two gates that end every call (see steps.h). For a kernel that waits for shards itself (`offer`), it
//   also stages this rank's shard.
//
// No call waits on the host, and all but `offer` may be captured in a CUDA graph.
//
// Gathers pull and scatters push, so that each byte is copied once. A pulled shard arrives where the matmul reads it; a
// pushed one would need a second copy out of a slot. A pushed block is copied from the matmul's output and is summed in
// its slot.
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
  // addresses: memory of the ranks' workspaces, by rank, at least Layout::bytes() each.
  // streams:   the watchdog's stream, which others may use too for copies that never wait; the send stream; the pull
  //            streams. If empty, the workspace creates them, with one pull stream per peer, but at most
  //            kMaxPullStreams.
  //
  // No rank may begin a call before all ranks have created their workspace.
  Workspace(std::shared_ptr<const Driver> driver, int device, int rank, std::vector<DeviceAddress> addresses,
            int64_t gather_bytes, int64_t scatter_bytes, std::vector<Stream> streams = {});
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  const Layout& layout() const { return protocol_.layout(); }
  int rank() const { return protocol_.rank(); }
  StreamWatchdog& watchdog() { return watchdog_; }
  bool is_forked_child() const { return driver_->is_forked_child(); }
  // Waits on the host until all enqueued work has completed, for at most `seconds`. Returns true if it has.
  bool wait_idle(double seconds);

  // One call of an op, from `begin` to `finish`. All ranks make the same calls in the same order, with the same gathers
  // and scatters. A call may begin and end between `begin` and `finish` of another.
  struct Call {
    uint64_t call_number = 0;
    std::vector<SharedEvent> arrival_events;  // of the last gather, by rank
    bool has_sends = false;                   // work in the send stream
    int offered_channel = -1;                 // channel of `offer`; -1: none
  };

  Call begin(Op op, Stream stream, double timeout_seconds);
  // Starts a gather of `shard`. `to`: destinations of the peers' shards, by rank; the entry of this rank is not used.
  // The caller may not access any of this memory until the end of the call.
  void gather(Call& call, Stream stream, Memory shard, const std::vector<Memory>& to);
  // Makes `stream` wait for the shard of `peer`.
  void wait_for(const Call& call, Stream stream, int peer);
  // Starts a gather for a kernel that polls for each shard itself (Layout::arrived_word of the returned channel); the
  // kernel is the next work in `stream`. `to` may contain a destination for this rank's shard too. Not for captures,
  // because CUDA does not guarantee that branches of a graph run concurrently. Repeated offers with the same memory are
  // launched as two graphs.
  int offer(Call& call, Stream stream, Op op, Memory shard, const std::vector<Memory>& to);
  // Begins a scatter and returns its channel, the argument `scatter` of the functions below. Throws std::logic_error if
  // kChannels scatters have begun and none of them has been received: the sends of a further one would wait until they
  // are received.
  int scatter();
  // Sends `block` to `peer` after the work already enqueued in `stream`. The caller may not write to `block` until the
  // end of the call.
  void push(Call& call, Stream stream, int scatter, int peer, Memory block);
  // Makes `stream` wait until the blocks of all peers have arrived in their slots. Call `release` behind the work that
  // reads them, so that peers may overwrite them.
  void receive(const Call& call, Stream stream, int scatter);
  void release(Stream stream, int scatter);
  // Ends the call in `stream`. `results`: memory that is filled with NaN if the call fails.
  void finish(Call& call, Stream stream, std::vector<Memory> results);

 private:
  // Enqueues in `stream` the steps that add_steps() appends to steps_.
  template <typename AddSteps>
  void enqueue(Stream stream, AddSteps&& add_steps);
  std::vector<Stream> make_streams();
  // Makes `stream` wait for the gates of the last call if that was in another stream: only one call at a time can be at
  // a rank's gates.
  void wait_for_last_call(Stream stream);
  void enqueue_fetches(const std::vector<Stream>& streams, int index, uint64_t call, const std::vector<Memory>& to);
  // All other streams wait for the first.
  void fork_streams(const std::vector<Stream>& streams);
  // The first stream waits for all others.
  void join_streams(const std::vector<Stream>& streams);
  // Runs enqueue_work(streams), which adds work to the first of `streams`, and to the others between a fork from the
  // first and a join with it. From the second time with the same key on, it launches a graph of that work, which is
  // captured in `capture_streams`.
  template <typename Work>
  void launch_repeated(std::vector<uint64_t> key, const std::vector<Stream>& streams,
                       const std::vector<Stream>& capture_streams, Work&& enqueue_work);
  DeviceAddress address(const Location& location) const;
  SharedEvent record(Stream stream);
  Stream pull_stream(int peer) const;
  bool has_passed_gates() const { return watchdog_.load_word(passed_word(layout().world())) >= last_passage_; }

  std::shared_ptr<const Driver> driver_;
  int device_;
  Protocol protocol_;
  std::vector<DeviceAddress> addresses_;
  driver::EventPool events_;
  std::vector<std::unique_ptr<driver::OwnedStream>> owned_streams_;
  std::vector<Stream> streams_;  // the watchdog's stream, the send stream, the pull streams
  Stream send_stream_;
  std::vector<Stream> pull_streams_;
  Steps steps_;
  std::vector<driver::MemoryOp> memory_ops_;
  uint64_t call_count_ = 0;
  uint64_t gather_count_ = 0;
  uint64_t scatter_count_ = 0;
  SharedEvent push_events_[kChannels];    // by scatter: recorded after its last block
  bool is_scatter_open_[kChannels] = {};  // by scatter: begun and not yet received
  // True if `gather`, or `offer`, has enqueued work in the pull streams since they were last ordered, outside of
  // captures.
  bool has_gather_pulls_ = false, has_offer_pulls_ = false;
  uint64_t passage_count_ = 0;
  Stream last_stream_ = nullptr;
  uint64_t last_passage_ = 0;  // of calls outside of captures
  // Graphs of offers by their memory; null after the first such offer, which runs without a graph.
  std::map<std::vector<uint64_t>, std::unique_ptr<const driver::Graph>> graphs_;
  StreamWatchdog watchdog_;  // last member: it uses the streams
};

}  // namespace fused_tp::copy_engine
