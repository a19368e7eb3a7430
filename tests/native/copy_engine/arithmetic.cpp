// Words and places of csrc/copy_engine/layout.h, and what the steps of a call say: for every number of ranks.
#include <cstdio>
#include <cstdlib>
#include <set>
#include <utility>
#include <vector>

#include "copy_engine/steps.h"
#include "driver/deadlines.h"

using namespace fused_tp::copy_engine;

namespace {

void require(bool condition, const char* what, int world) {
  if (condition) return;
  std::fprintf(stderr, "wrong for %d ranks: %s\n", world, what);
  std::exit(1);
}

void words_are_distinct(const Layout& layout) {
  const int world = layout.world();
  std::set<int> words{layout.gate(0), layout.gate(1)};
  for (Way way : {Way::kGather, Way::kScatter})
    for (int index = 0; index < kChannels; ++index)
      for (int peer = 0; peer < world; ++peer) {
        const Channel channel{way, index};
        words.insert(layout.ready(channel, peer));
        words.insert(layout.free(channel, peer));
        require(layout.first_value(layout.ready(channel, peer)) == 0, "something is ready at first", world);
        require(layout.first_value(layout.free(channel, peer)) == 1, "something is not free at first", world);
      }
  require(static_cast<int>(words.size()) == 2 + layout.flags(), "two flags are one word", world);
  require(*words.rbegin() == layout.words() - 1, "words that nobody has", world);
  require(*std::next(words.begin(), 2) == layout.first_flag(), "flags do not begin where they should", world);
  for (int which = 0; which < 2; ++which)
    require(layout.first_value(layout.gate(which)) == kOpen, "a gate is closed at first", world);
}

void places_do_not_overlap(const Layout& layout, int64_t gather_bytes, int64_t scatter_bytes) {
  const int world = layout.world();
  std::vector<std::pair<int64_t, int64_t>> places{{0, 8 * layout.words()}};
  for (int index = 0; index < kChannels; ++index) places.emplace_back(layout.stage(index), gather_bytes);
  for (int index = 0; index < kChannels; ++index)
    for (int sender = 0; sender < world; ++sender) places.emplace_back(layout.slot(index, sender), scatter_bytes);
  int64_t end = 0;
  for (const auto& [start, bytes] : places) {
    require(start >= end, "two places overlap", world);
    require(start % kAlignment == 0, "a place is not aligned", world);
    end = start + bytes;
  }
  require(end <= layout.bytes(), "a place is beyond the end", world);
  for (int index = 0; index < kChannels; ++index)
    for (int sender = 0; sender < world; ++sender)
      require(layout.slot(index, sender) == layout.slot(index, 0) + sender * layout.slot_bytes(),
              "terms of a sum are not equally far apart", world);
}

// What the steps of one rank wait for or write must be words that the peer means by them.
void flags_meet(const Layout& layout) {
  const int world = layout.world();
  for (int sender = 0; sender < world; ++sender)
    for (int receiver = 0; receiver < world; ++receiver) {
      if (sender == receiver) continue;
      Steps push, receive, release;
      Protocol(layout, sender).push(push, 1, 7, receiver, {kPrivate, 4096}, 100);
      Protocol(layout, receiver).receive(receive, 1, 7);
      Protocol(layout, receiver).release(release, 1);
      const Step& told = push.back();
      bool awaited = false, given_back = false;
      for (const Step& step : receive)
        awaited = awaited || (step.kind == Step::kWait && step.rank == told.rank && step.word == told.word);
      for (const Step& step : release)
        given_back = given_back || (step.rank == sender && step.word == push[1].word && step.value == 1);
      require(told.rank == receiver && awaited, "nobody waits for what was sent", world);
      require(push[1].kind == Step::kWait && push[1].rank == sender && given_back, "nothing is given back", world);
    }
}

void progress_is_odd_while_waiting(int world) {
  std::set<int> words{kGateProgress};
  for (Wait wait : {Wait::kPull, Wait::kSend, Wait::kReceive})
    for (int peer = 0; peer < world; ++peer) words.insert(progress_of(wait, peer, world));
  require(static_cast<int>(words.size()) == progress_words(world), "two progress words are one", world);
  require(*words.rbegin() == progress_words(world) - 1, "progress words that nobody has", world);
  for (uint64_t call : {uint64_t{0}, uint64_t{12345678901}}) {
    require(waiting(call) % 2 == 1 && done(call) % 2 == 0 && (waiting(call) - 1) / 2 == call, "numbers of calls",
            world);
    for (int which = 0; which < 2; ++which)
      require(at_gate(call, which) % 2 == 1 && at_gate(call, which) / 8 == call, "numbers of passages", world);
    require(behind_gates(call) % 2 == 0 && behind_gates(call) / 8 == call, "numbers of passages", world);
    require(!(behind_gates(call) & fused_tp::driver::GraphDeadline::kSeen), "a number in the way of the mark", world);
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
        flags_meet(layout);
        progress_is_odd_while_waiting(world);
      }
}
