// Driver::memory_ops with more operations than fit into one driver call, on the double of the driver, which has the
// same limit as cuda.h.
#include <cstdint>
#include <vector>

#include "../doubles/expect.h"
#include "driver/api.h"
#include "driver/driver.h"

using namespace fused_tp::driver;

extern "C" {
long cuda_double_stream_calls();
int cuStreamBatchMemOp_v2(Stream, unsigned, BatchMemOp*, unsigned);
}

int main() {
  const auto driver = Driver::open("");  // this program, which contains the double
  const Driver::ContextGuard guard(*driver, 0);
  const OwnedStream stream(driver, 0, Priority::kLeast);
  for (size_t count : {0, 1, 254, 255, 256, 257, 510, 511, 1021}) {
    std::vector<uint64_t> words(count, 0);
    std::vector<MemoryOp> ops;
    for (size_t i = 0; i < count; ++i)
      ops.push_back({MemoryOp::kWrite, reinterpret_cast<DeviceAddress>(&words[i]), 7 * i + 1});
    const long before = cuda_double_stream_calls();
    driver->enqueue_memory_ops(stream.get(), ops);
    EXPECT(cuda_double_stream_calls() - before == static_cast<long>((count + 254) / 255));
    EXPECT(driver->synchronize(stream.get(), 60));
    for (size_t i = 0; i < count; ++i) EXPECT(words[i] == 7 * i + 1);
  }
  uint64_t word = 0;
  std::vector<BatchMemOp> batch(256);
  for (BatchMemOp& one : batch) one.op = {kWriteValue64, reinterpret_cast<DeviceAddress>(&word), 1, 0, 0};
  EXPECT(cuStreamBatchMemOp_v2(stream.get(), 255, batch.data(), 0) == kSuccess);
  EXPECT(cuStreamBatchMemOp_v2(stream.get(), 256, batch.data(), 0) != kSuccess);
  EXPECT(driver->synchronize(stream.get(), 60) && word == 1);
}
