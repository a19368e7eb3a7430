// A matmul and its movement, chunk by chunk: exchanges on a communicator's stream, and an event behind each of them for
// the stream that computes. Nothing here waits on the host, so all of it can be captured in a CUDA graph.
//
// Memory: the caller keeps what is sent and received until every exchange has been waited for, or the communicator's
// stream has passed it by other means. Who waits for all exchanges in the stream that the memory belongs to may then
// free it like any other memory of that stream.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "nccl/chunk_plan.h"
#include "nccl/communicator.h"

namespace fused_tp::nccl {

class Pipeline {
 public:
  // `exchanges`: how many there are going to be.
  Pipeline(std::shared_ptr<Communicator> communicator, size_t exchanges)
      : communicator_(std::move(communicator)), expected_(exchanges) {}
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  // How many exchanges have been enqueued.
  size_t size() const;
  // `stream` goes on once exchange i, and with it all before it, have ended here. Throws what the communicator has
  // failed with.
  void wait(size_t i, Stream stream);
  // Whether all exchanges have been enqueued and have ended. For a thread of our own: it ignores captures from then on.
  bool ended() const;
  // Which exchange waits for peers now: the first that has not ended, if all before it have and this rank has come to
  // it; -1: none. Like `ended`.
  int64_t waiting() const;
  // Some exchange is part of a CUDA graph.
  bool captured() const;

 protected:
  // Nothing is enqueued where there is nothing to move.
  void add(const std::vector<Transfer>& transfers, std::optional<Stream> after);
  void add(Ticket ticket);
  Communicator& communicator() { return *communicator_; }

 private:
  std::shared_ptr<Communicator> communicator_;
  size_t expected_;
  mutable std::mutex mutex_;  // of the tickets: `ended` is asked by another thread
  std::vector<Ticket> tickets_;
};

// Some sends and receives at once, behind what is in `stream`: a step of a ring, an all-to-all.
class Movement : public Pipeline {
 public:
  Movement(std::shared_ptr<Communicator> communicator, const std::vector<Transfer>& transfers, Stream stream);
};

// Rows of `row_bytes` bytes from all ranks, `counts[r]` from rank r, one rank after the other into `gathered`. All
// exchanges are enqueued at once, behind what is in `stream`.
class GatherPipeline : public Pipeline {
 public:
  GatherPipeline(std::shared_ptr<Communicator> communicator, const ChunkPlan& plan, const std::vector<int64_t>& counts,
                 int64_t row_bytes, const char* own, char* gathered, Stream stream);

  // Whether the own rows are copied to their place in `gathered` too. Otherwise the caller copies them.
  bool brings_own_rows() const { return brings_own_rows_; }

 private:
  bool brings_own_rows_ = false;
};

// The terms of the own rows from all ranks. `partial` holds this rank's terms of the rows of all ranks, one rank after
// the other, or (`without_own`) of all other ranks. The terms of rank r start at row `r * counts[rank]` of `terms`;
// this rank's own are the caller's to put there.
class ScatterPipeline : public Pipeline {
 public:
  ScatterPipeline(std::shared_ptr<Communicator> communicator, std::shared_ptr<const ChunkPlan> plan,
                  std::vector<int64_t> counts, int64_t row_bytes, const char* partial, bool without_own, char* terms);

  // Enqueues the next exchange: `stream` has by now computed the rows that it sends.
  void send(Stream stream);

 private:
  std::shared_ptr<const ChunkPlan> plan_;
  std::vector<int64_t> counts_;
  int64_t row_bytes_;
  const char* partial_;
  bool without_own_;
  char* terms_;
};

}  // namespace fused_tp::nccl
