// Tests of csrc/driver/deadlines.h with simulated times and answers.
#include "driver/deadlines.h"

#include <cstdio>
#include <random>
#include <set>
#include <vector>

#include "expect.h"

using namespace fused_tp::driver;

namespace {

struct Stream {
  Deadlines<int> deadlines;
  std::set<int> begun, ended;

  auto poll(int64_t now) {
    return deadlines.poll(
        now, [this](int op) { return begun.count(op) > 0; }, [this](int op) { return ended.count(op) > 0; });
  }
};

void ops_end_in_order() {
  Stream s;
  EXPECT(s.deadlines.empty() && s.deadlines.shortest_timeout_ns() == kNever && !s.poll(0));
  s.deadlines.add(1, 100);
  s.deadlines.add(2, 50);
  EXPECT(s.deadlines.shortest_timeout_ns() == 50);
  s.begun = {1, 2};
  s.ended = {1, 2};
  EXPECT(!s.poll(1'000'000));  // late, but both have ended
  EXPECT(s.deadlines.empty());
}

void who_has_expired_lets_go_of_all() {
  Stream s;
  s.deadlines.add(1, 10);
  s.deadlines.add(2, 10);
  s.begun = {1};
  EXPECT(!s.poll(5));
  EXPECT(s.poll(15)->op == 1);
  EXPECT(s.deadlines.empty() && !s.poll(1000));
  s.deadlines.add(3, 10);
  s.deadlines.clear();
  EXPECT(s.deadlines.empty());
}

void never_is_never() {
  Stream s;
  s.deadlines.add(1, kNever);
  s.begun = {1};
  EXPECT(!s.poll(0) && !s.poll(kNever - 1));
}

// Comparison with a model: an op within its time never expires, another expires at the first poll after its time. Time
// counts from when the op has begun, possibly after earlier computation of the device, and the op before it has ended.
void at_random() {
  std::mt19937 chance(7);
  for (int trial = 0; trial < 2000; ++trial) {
    Stream s;
    const int count = 1 + static_cast<int>(chance() % 6);
    std::vector<int64_t> begins, ends, timeouts;
    int64_t time = 0;
    int64_t expires = kNever;
    int stuck = -1;
    for (int op = 0; op < count; ++op) {
      begins.push_back(std::max<int64_t>(0, time + static_cast<int64_t>(chance() % 100) - 50));
      const int64_t start = std::max(begins.back(), time);
      ends.push_back(start + 1 + static_cast<int64_t>(chance() % 100));
      timeouts.push_back(1 + static_cast<int64_t>(chance() % 120));
      s.deadlines.add(op, timeouts.back());
      // Polled in every unit of time, so the begin is seen at once.
      if (stuck < 0 && start + timeouts[op] < ends[op]) stuck = op, expires = start + timeouts[op];
      time = ends.back();
    }
    bool told = false;
    for (int64_t now = 0; now <= time + 1; ++now) {
      for (int op = 0; op < count; ++op) {
        if (begins[op] <= now) s.begun.insert(op);
        if (ends[op] <= now) s.ended.insert(op);
      }
      const auto expired = s.poll(now);
      EXPECT(expired.has_value() == (now == expires));
      if (expired) EXPECT(expired->op == stuck && expired->waited_ns == timeouts[stuck]);
      told |= expired.has_value();
    }
    EXPECT(told == (stuck >= 0) && s.deadlines.empty());
  }
}

void graphs_tell_by_a_word() {
  std::atomic<uint64_t> word{0};
  GraphDeadline graph;
  EXPECT(!graph.poll(0, word, 10) && !graph.is_inside_op());
  word = 2 * 3 + 1;
  EXPECT(!graph.poll(100, word, 10) && graph.is_inside_op());
  EXPECT(word == (GraphDeadline::kSeenBit | 7));
  EXPECT(!graph.poll(109, word, 10));
  const auto expired = graph.poll(110, word, 10);
  EXPECT(expired && expired->op == 3 && expired->waited_ns == 10);

  // The same op in the next replay is progress, although the word has the same value.
  word = 7;
  EXPECT(!graph.poll(111, word, 10));
  word = 7;
  EXPECT(!graph.poll(125, word, 10));
  EXPECT(!graph.poll(134, word, 10));
  EXPECT(graph.poll(135, word, 10)->op == 3);

  word = 8;  // the end of the op
  EXPECT(!graph.poll(500, word, 10) && !graph.is_inside_op() && word == 8);
}

}  // namespace

int main() {
  ops_end_in_order();
  who_has_expired_lets_go_of_all();
  never_is_never();
  at_random();
  graphs_tell_by_a_word();
  std::puts("all as expected");
}
