// Words and places of csrc/copy_engine/layout.h, and the progress values of steps, for every number of ranks.
#include <set>
#include <vector>

#include "../doubles/expect.h"
#include "copy_engine/steps.h"
#include "driver/deadlines.h"

using namespace fused_tp::copy_engine;

namespace {

void words_are_distinct(const Layout& layout) {
  std::set<int> words;
  for (Way way : {Way::kGather, Way::kScatter})
    for (int index = 0; index < kChannels; ++index)
      for (int peer = 0; peer < layout.world(); ++peer) {
        const int ready = layout.ready({way, index}, peer), free = layout.free({way, index}, peer);
        words.insert({ready, free});
        EXPECT(layout.first_value(ready) == 0 && layout.first_value(free) == 1);
      }
  for (int index = 0; index < kChannels; ++index)
    for (int peer = 0; peer < layout.run(); ++peer) words.insert(layout.arrived(index, peer));
  EXPECT(static_cast<int>(words.size()) == layout.flags());
  for (int word : words) EXPECT(layout.is_flag(word));
  for (int index = 0; index < kChannels; ++index) {
    for (int position = 0; position < layout.run(); ++position) words.insert(layout.order(index) + position);
    words.insert({layout.begun(index), layout.drained(index)});
  }
  EXPECT(*words.begin() == layout.first_flag() && *words.rbegin() == layout.words() - 1);
  EXPECT(static_cast<int>(words.size()) == layout.words() - layout.first_flag());
  for (int word : words)
    if (word >= layout.arrived(0, 0)) EXPECT(layout.first_value(word) == 0);
  for (int which = 0; which < 2; ++which)
    EXPECT(layout.gate(which) == which && which < layout.first_flag() && layout.first_value(which) == kOpen);
}

void places_do_not_overlap(const Layout& layout, int64_t gather_bytes, int64_t scatter_bytes) {
  int64_t end = 8 * layout.words();
  auto next = [&](int64_t start, int64_t bytes) {
    EXPECT(start >= end && start % kAlignment == 0);
    end = start + bytes;
  };
  for (int index = 0; index < kChannels; ++index) next(layout.stage(index), gather_bytes);
  for (int index = 0; index < kChannels; ++index)
    for (int sender = 0; sender < layout.world(); ++sender) {
      next(layout.slot(index, sender), scatter_bytes);
      EXPECT(layout.slot(index, sender) == layout.slot(index, 0) + sender * layout.slot_bytes());  // terms of a sum
    }
  EXPECT(end <= layout.bytes());
}

void what_kernels_are_given_is_aligned(int world) {
  const Layout layout(world, 1, 1);
  EXPECT(8 * expired_word(world) % 16 == 0);
  for (int index = 0; index < kChannels; ++index) {
    EXPECT(8 * layout.arrived(index, 0) % 16 == 0 && 8 * layout.order(index) % 16 == 0);
    EXPECT(layout.stage(index) % kAlignment == 0 && layout.slot(index, 0) % kAlignment == 0);
  }
}

void progress_is_odd_while_waiting(int world) {
  std::set<int> words{kGateProgress};
  for (Wait wait : {Wait::kPull, Wait::kSend, Wait::kReceive})
    for (int peer = 0; peer < world; ++peer) words.insert(progress_of(wait, peer, world));
  EXPECT(static_cast<int>(words.size()) == progress_words(world) && *words.rbegin() == progress_words(world) - 1);
  EXPECT(words.insert(passed_word(world)).second && words.insert(expired_word(world)).second);
  EXPECT(*words.rbegin() == told_words(world) - 1);
  for (uint64_t call : {uint64_t{0}, uint64_t{12345678901}}) {
    EXPECT(waiting(call) % 2 == 1 && done(call) % 2 == 0 && (waiting(call) - 1) / 2 == call);
    for (int which = 0; which < 2; ++which) EXPECT(at_gate(call, which) % 2 == 1 && at_gate(call, which) / 8 == call);
    EXPECT(behind_gates(call) % 2 == 0 && behind_gates(call) / 8 == call);
    EXPECT(!(behind_gates(call) & fused_tp::driver::GraphDeadline::kSeen));
  }
}

}  // namespace

int main() {
  for (int world : {1, 2, 3, 4, 7, 8, 16, 63})
    for (int64_t gather_bytes : {int64_t{0}, int64_t{1}, int64_t{256}, int64_t{1} << 33})
      for (int64_t scatter_bytes : {int64_t{0}, int64_t{255}, int64_t{1} << 32}) {
        const Layout layout(world, gather_bytes, scatter_bytes);
        words_are_distinct(layout);
        places_do_not_overlap(layout, gather_bytes, scatter_bytes);
        progress_is_odd_while_waiting(world);
      }
  for (int world = 1; world <= 64; ++world) what_kernels_are_given_is_aligned(world);
}
