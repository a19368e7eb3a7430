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
  for (ChannelKind way : {ChannelKind::kGather, ChannelKind::kScatter})
    for (int index = 0; index < kChannels; ++index)
      for (int peer = 0; peer < layout.world(); ++peer) {
        const int ready = layout.ready_word({way, index}, peer), free = layout.free_word({way, index}, peer);
        words.insert({ready, free});
        EXPECT(layout.initial_value(ready) == 0 && layout.initial_value(free) == 1);
      }
  for (int index = 0; index < kChannels; ++index)
    for (int peer = 0; peer < layout.array_words(); ++peer) words.insert(layout.arrived_word(index, peer));
  EXPECT(static_cast<int>(words.size()) == layout.flag_words());
  for (int word : words) EXPECT(layout.is_flag(word));
  for (int index = 0; index < kChannels; ++index) {
    for (int position = 0; position < layout.array_words(); ++position)
      words.insert(layout.order_word(index) + position);
    words.insert({layout.copies_begin_word(index), layout.copies_done_word(index)});
  }
  EXPECT(*words.begin() == layout.first_flag_word() && *words.rbegin() == layout.total_words() - 1);
  EXPECT(static_cast<int>(words.size()) == layout.total_words() - layout.first_flag_word());
  for (int word : words)
    if (word >= layout.arrived_word(0, 0)) EXPECT(layout.initial_value(word) == 0);
  for (int which = 0; which < 2; ++which)
    EXPECT(layout.gate_word(which) == which && which < layout.first_flag_word() &&
           layout.initial_value(which) == kOpen);
}

void places_do_not_overlap(const Layout& layout, int64_t gather_bytes, int64_t scatter_bytes) {
  int64_t end = 8 * layout.total_words();
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
    EXPECT(8 * layout.arrived_word(index, 0) % 16 == 0 && 8 * layout.order_word(index) % 16 == 0);
    EXPECT(layout.stage(index) % kAlignment == 0 && layout.slot(index, 0) % kAlignment == 0);
  }
}

void progress_is_odd_while_wait_begun(int world) {
  std::set<int> words{kGateProgress};
  for (Wait wait : {Wait::kPull, Wait::kSend, Wait::kReceive})
    for (int peer = 0; peer < world; ++peer) words.insert(progress_word(wait, peer, world));
  EXPECT(static_cast<int>(words.size()) == progress_words(world) && *words.rbegin() == progress_words(world) - 1);
  EXPECT(words.insert(passed_word(world)).second && words.insert(expired_word(world)).second);
  EXPECT(*words.rbegin() == host_words(world) - 1);
  for (uint64_t call : {uint64_t{0}, uint64_t{12345678901}}) {
    EXPECT(wait_begun(call) % 2 == 1 && wait_ended(call) % 2 == 0 && (wait_begun(call) - 1) / 2 == call);
    for (int which = 0; which < 2; ++which)
      EXPECT(held_at_gate(call, which) % 2 == 1 && held_at_gate(call, which) / 8 == call);
    EXPECT(passed_gates(call) % 2 == 0 && passed_gates(call) / 8 == call);
    EXPECT(!(passed_gates(call) & fused_tp::driver::GraphDeadline::kSeenBit));
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
        progress_is_odd_while_wait_begun(world);
      }
  for (int world = 1; world <= 64; ++world) what_kernels_are_given_is_aligned(world);
}
