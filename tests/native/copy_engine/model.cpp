// Model checker of the protocol (csrc/copy_engine/steps.h): runs its steps in the orders in which they can happen, with
// ranks that give up at any moment, and looks for calls that pass their gates with wrong bytes, streams that block
// forever, and words that do not return to their initial values. Copies and sums take time: their sources may change
// meanwhile.
//
//     model <ranks> <calls> <ranks that may give up> <fault> <random walks, 0: all orders>
//
// Calls are letters: g is a gather, s a scatter; G and S begin in order but end after all other calls. o is a gather
// whose shards a kernel, next in the caller's stream, takes as they arrive, here in rank order. A fault breaks the
// protocol on purpose. Prints the number of states (or steps), and the problem if there is one; exit status 0 or 1.
#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "copy_engine/steps.h"

using namespace fused_tp::copy_engine;

namespace {

struct Action {
  enum Kind { kWait, kWrite, kCopy, kCopied, kSay, kRecord, kWaitEvent, kSum, kSummed, kDeliver, kTake } kind;
  int rank = 0;
  int word = 0;          // also: event, passage
  int value = 0;         // also: call
  int from = 0, to = 0;  // cells of memory
};

constexpr uint8_t kTorn = 0xFE, kWrong = 0xFF;

std::string fault;
int world, calls, givers;
std::string script;

bool is_scatter(int call) { return std::tolower(script[call]) == 's'; }
bool is_offer(int call) { return script[call] == 'o'; }

// Cells of each rank: its stages, its slots, the destinations of shards, and the sums of slots.
int cells_of_rank() { return kChannels + kChannels * world + calls * world + calls; }
int stage_cell(int rank, int index) { return rank * cells_of_rank() + index; }
int slot_cell(int rank, int index, int sender) { return stage_cell(rank, kChannels) + index * world + sender; }
// Kernels that wait for shards use the same memory in every call.
int shard_cell(int rank, int call, int peer) {
  return slot_cell(rank, kChannels, 0) + (is_offer(call) ? script.find('o') : call) * world + peer;
}
int sum_cell(int rank, int call) { return slot_cell(rank, kChannels, 0) + calls * world + call; }
int source_cell(int call) { return world * cells_of_rank() + call; }  // data that a call sends; never changes

// Streams of a rank: the caller's, `out`, and one `in` per distance. Graphs, launched in the first `in`, have one more
// for each other distance.
int streams_of_rank() { return 2 + world - 1 + std::max(0, world - 2); }
int in_stream(int distance, bool of_graph) { return 1 + distance + (of_graph && distance > 1 ? world - 2 : 0); }
std::vector<std::vector<Action>> programs;  // by rank * streams_of_rank() + stream
std::vector<int> events;

int cell_of(const Location& place, const Layout& layout) {
  if (place.rank == kPrivate) return static_cast<int>(place.offset);
  for (int index = 0; index < kChannels; ++index) {
    if (place.offset == layout.stage(index)) return stage_cell(place.rank, index);
    for (int sender = 0; sender < world; ++sender)
      if (place.offset == layout.slot(index, sender)) return slot_cell(place.rank, index, sender);
  }
  std::abort();
}

void add(int rank, int stream, const Steps& steps, const Layout& layout) {
  auto& program = programs[rank * streams_of_rank() + stream];
  std::vector<Action> added;
  for (const Step& step : steps) {
    if (step.kind == Step::kWait) added.push_back({Action::kWait, step.rank, step.word});
    if (step.kind == Step::kWrite)
      added.push_back({Action::kWrite, step.rank, step.word, static_cast<int>(step.value)});
    if (step.kind == Step::kReport && step.word == kGateProgress)
      added.push_back({Action::kSay, rank, 0, static_cast<int>(step.value)});
    if (step.kind == Step::kCopy) {
      const int from = cell_of(step.from, layout), to = cell_of(step.to, layout);
      added.push_back({Action::kCopy, rank, 0, 0, from, to});
      added.push_back({Action::kCopied, rank, 0, 0, from, to});
    }
  }
  // Faults that omit a write: whether it is the sender's, and its value.
  static const std::map<std::string, std::pair<bool, int>> left_out = {
      {"token not taken", {true, 0}}, {"ready not cleared", {false, 0}}, {"not given back", {false, 1}}};
  const auto writes = [](int value) {
    return [value](const Action& a) { return a.kind == Action::kWrite && a.value == value; };
  };
  if (const auto found = left_out.find(fault); found != left_out.end() && found->second.first == (stream == 1)) {
    const auto at = std::find_if(added.begin(), added.end(), writes(found->second.second));
    if (at != added.end()) added.erase(at);
  }
  if (fault == "told before copied" && stream == 1 && !added.empty()) {
    const auto told = std::find_if(added.begin(), added.end(), writes(1));
    const auto copy = std::find_if(added.begin(), added.end(), [](const Action& a) { return a.kind == Action::kCopy; });
    std::rotate(copy, told, told + 1);
  }
  program.insert(program.end(), added.begin(), added.end());
}

void build() {
  programs.assign(world * streams_of_rank(), {});
  events.assign(world, 0);
  for (int rank = 0; rank < world; ++rank) {
    const Layout layout(world, 256, 256);
    const Protocol protocol(layout, rank);
    auto& own = programs[rank * streams_of_rank()];
    int gathers = 0, scatters = 0;
    bool pulled = false, joined = false;  // as in Workspace
    auto record = [&](int stream) {
      const int event = events[rank]++;
      programs[rank * streams_of_rank() + stream].push_back({Action::kRecord, rank, event});
      return event;
    };
    auto wait_event = [&](int stream, int event) {
      programs[rank * streams_of_rank() + stream].push_back({Action::kWaitEvent, rank, event});
    };
    std::vector<std::vector<int>> arrived(calls);
    std::vector<int> indices(calls), pushed(calls);
    auto begin_call = [&](int call) {
      Steps steps;
      if (is_offer(call)) {
        const int index = indices[call] = gathers++ % kChannels;
        if (pulled && fault != "not joined") wait_event(0, record(1));
        protocol.offer(steps, index, call, {kPrivate, source_cell(call)}, {}, 1, false);
        if (fault == "arrived not cleared") steps.erase(steps.begin(), steps.begin() + 2 * world);
        add(rank, 0, steps, layout);
        // In the rank's first `in` stream, and in others ordered after it, as in Workspace::fetch.
        auto fetched = [&](auto&& give) {
          steps.clear();
          give();
          return steps;
        };
        if (pulled && fault != "not joined")
          for (int distance = 2; distance < world; ++distance) wait_event(2, record(in_stream(distance, false)));
        pulled = false;
        joined = true;
        if (fault != "not begun") add(rank, 2, fetched([&] { protocol.begin_fetch(steps, index); }), layout);
        const int begun = record(2);
        for (int distance = 1; distance < world; ++distance) {
          const int peer = peer_at(rank, distance, world), stream = in_stream(distance, true);
          if (distance > 1) wait_event(stream, begun);
          add(rank, stream, fetched([&] {
                protocol.fetch(steps, index, call, peer, {kPrivate, shard_cell(rank, call, peer)}, 1);
                if (fault == "arrived before copied") std::rotate(steps.begin(), steps.end() - 1, steps.end());
              }),
              layout);
          if (distance > 1) wait_event(2, record(stream));
        }
        add(rank, 2, fetched([&] { protocol.end_fetch(steps, index); }), layout);
        for (int peer = 0; peer < world; ++peer) {
          if (peer == rank) continue;
          own.push_back({Action::kWait, rank, layout.arrived_word(index, peer)});
          own.push_back({Action::kTake, rank, peer, call, shard_cell(rank, call, peer)});
        }
        return;
      }
      if (!is_scatter(call)) {
        const int index = gathers++ % kChannels;
        const int begun = record(0);
        wait_event(1, begun);
        protocol.stage(steps, index, call, {kPrivate, source_cell(call)}, 1);
        add(rank, 1, steps, layout);
        const int staged = record(1);
        const int last = joined && fault != "not joined" ? record(2) : -1;
        pulled = true;
        joined = false;
        for (int distance = 1; distance < world; ++distance) {
          const int peer = peer_at(rank, distance, world);
          wait_event(1 + distance, staged);
          if (last >= 0 && distance > 1) wait_event(1 + distance, last);
          steps.clear();
          protocol.pull(steps, index, call, peer, {kPrivate, shard_cell(rank, call, peer)}, 1);
          add(rank, 1 + distance, steps, layout);
          arrived[call].push_back(record(1 + distance));
        }
        return;
      }
      indices[call] = scatters++ % kChannels;
      for (int distance = world - 1; distance >= 1; --distance) {
        wait_event(1, record(0));
        steps.clear();
        protocol.push(steps, indices[call], call, peer_at(rank, distance, world), {kPrivate, source_cell(call)}, 1);
        add(rank, 1, steps, layout);
      }
      pushed[call] = record(1);
    };
    auto pass_gates = [&](int call) {
      Steps steps;
      protocol.pass_gates(steps, call, false);
      if (fault == "one gate") steps.erase(steps.begin() + 2, steps.begin() + 4);
      add(rank, 0, steps, layout);
    };
    auto end_call = [&](int call) {
      Steps steps;
      if (is_scatter(call)) {
        wait_event(0, pushed[call]);
        protocol.receive(steps, indices[call], call);
        add(rank, 0, steps, layout);
        own.push_back({Action::kSum, rank, indices[call], call, 0, 0});
        if (fault == "gates before the sum") pass_gates(call);
        own.push_back({Action::kSummed, rank, indices[call], call, 0, 0});
        steps.clear();
        protocol.release(steps, indices[call]);
        add(rank, 0, steps, layout);
      }
      if (is_offer(call)) {
        steps.clear();
        protocol.wait_copies_done(steps, indices[call]);
        if (fault != "not drained") add(rank, 0, steps, layout);
      } else {
        for (int event : arrived[call]) wait_event(0, event);
        wait_event(0, record(1));
      }
      if (fault != "gates before the sum" || !is_scatter(call)) pass_gates(call);
      own.push_back({Action::kDeliver, rank, 0, call, 0, 0});
    };
    for (int call = 0; call < calls; ++call) {
      begin_call(call);
      if (std::islower(script[call])) end_call(call);
    }
    for (int call = 0; call < calls; ++call)
      if (std::isupper(script[call])) end_call(call);
  }
}

// Next action of a rank that has given up.
enum Rescue : uint8_t { kHealthy, kClosing, kRescuing = 100, kShut, kFilled };

constexpr int kMostRanks = 4, kMostCalls = 8, kMostStreams = kMostRanks * 2 * kMostRanks, kMostEvents = 64;
constexpr int kMostWords = Layout(kMostRanks, 0, 0).total_words();
constexpr int kMostCells = kMostRanks * (kChannels * (1 + kMostRanks) + kMostCalls * (kMostRanks + 1)) + kMostCalls;

// Consists of bytes only, so that states are hashed bytewise.
struct State {
  uint8_t words[kMostRanks][kMostWords];
  uint8_t cells[kMostCells];
  uint8_t positions[kMostStreams];
  uint8_t begun[kMostStreams][kMostRanks];  // values that running copies and sums have read at their begin
  uint8_t happened[kMostRanks][kMostEvents];
  uint8_t progress[kMostRanks], rescue[kMostRanks], aim[kMostRanks];
  uint8_t filled[kMostRanks][kMostCalls];
  uint8_t given;
};

State first() {
  State state{};
  const Layout layout(world, 256, 256);
  for (int rank = 0; rank < world; ++rank)
    for (int word = 0; word < layout.total_words(); ++word)
      state.words[rank][word] = static_cast<uint8_t>(layout.initial_value(word));
  for (int call = 0; call < calls; ++call) state.cells[source_cell(call)] = static_cast<uint8_t>(call + 1);
  return state;
}

// Empty, or a description of the problem.
std::string wrong;

// Executes the next action of a stream; false if it has none or the action must wait.
bool advance(State& s, int stream) {
  const auto& program = programs[stream];
  uint8_t& position = s.positions[stream];
  if (position == program.size()) return false;
  const Action& a = program[position];
  const int rank = a.kind == Action::kWrite ? stream / streams_of_rank() : a.rank;
  uint8_t* begun = s.begun[stream];
  switch (a.kind) {
    case Action::kWait:
      if (s.words[a.rank][a.word] != 1) return false;
      break;
    case Action::kWrite:
      s.words[a.rank][a.word] = static_cast<uint8_t>(a.value);
      break;
    case Action::kCopy:
      begun[0] = s.cells[a.from];
      s.cells[a.to] = kTorn;
      break;
    case Action::kCopied:
      s.cells[a.to] = s.cells[a.from] == begun[0] && begun[0] != kTorn ? begun[0] : kWrong;
      begun[0] = 0;
      break;
    case Action::kSay:
      s.progress[rank] = static_cast<uint8_t>(a.value);
      break;
    case Action::kRecord:
      s.happened[rank][a.word] = 1;
      break;
    case Action::kWaitEvent:
      if (!s.happened[rank][a.word]) return false;
      break;
    case Action::kSum:
      for (int peer = 0; peer < world; ++peer) begun[peer] = s.cells[slot_cell(rank, a.word, peer)];
      break;
    case Action::kSummed: {
      bool right = true;
      for (int peer = 0; peer < world; ++peer) {
        const uint8_t now = s.cells[slot_cell(rank, a.word, peer)];
        right = right && (peer == rank || (now == a.value + 1 && begun[peer] == now));
        begun[peer] = 0;
      }
      s.cells[sum_cell(rank, a.value)] = right ? static_cast<uint8_t>(a.value + 1) : kWrong;
      break;
    }
    case Action::kTake:
      if (s.cells[a.from] != a.value + 1) s.cells[sum_cell(rank, a.value)] = kWrong;
      break;
    case Action::kDeliver: {
      bool right = true;
      if (is_scatter(a.value)) {
        right = s.cells[sum_cell(rank, a.value)] == a.value + 1;
      } else {
        right = s.cells[sum_cell(rank, a.value)] != kWrong;
        for (int peer = 0; peer < world; ++peer)
          right = right && (peer == rank || s.cells[shard_cell(rank, a.value, peer)] == a.value + 1);
      }
      if (!right && !s.filled[rank][a.value])
        wrong = "rank " + std::to_string(rank) + " takes wrong bytes for right in call " + std::to_string(a.value);
      break;
    }
  }
  ++position;
  return true;
}

// Appends a state for each possible next action of a rank's rescue.
void rescues(const State& state, int rank, std::vector<State>& next) {
  const Layout layout(world, 256, 256);
  const Protocol protocol(layout, rank);
  State s = state;
  const uint8_t phase = s.rescue[rank];
  if (phase == kHealthy) {
    const bool told = s.words[rank][0] > 1 || s.words[rank][1] > 1;
    if (!told && s.given >= givers) return;
    if (!told) ++s.given;
    s.rescue[rank] = fault == "gates left open" ? kRescuing : kClosing;
    return next.push_back(s);
  }
  if (phase < kRescuing) {
    Steps steps;
    protocol.close_all_gates(steps);
    const Step& step = steps[phase - kClosing];
    s.words[step.rank][step.word] = static_cast<uint8_t>(step.value);
    s.rescue[rank] = phase - kClosing + 1 == static_cast<int>(steps.size()) ? kRescuing : phase + 1;
    return next.push_back(s);
  }
  uint8_t& aim = s.aim[rank];
  if (phase == kShut || phase == kFilled) {
    const int which = aim % 8 == 1 ? 0 : 1;
    if (phase == kShut) {
      if (which == 0) s.filled[rank][aim / 8] = 1;
      s.rescue[rank] = kFilled;
    } else {
      s.words[rank][layout.gate_word(which)] = kOpen;
      s.rescue[rank] = kRescuing;
      aim = 0;
    }
    return next.push_back(s);
  }
  // Set one flag that a stream waits for.
  for (int stream = rank * streams_of_rank(); stream < (rank + 1) * streams_of_rank(); ++stream) {
    const uint8_t position = s.positions[stream];
    if (position == programs[stream].size()) continue;
    const Action& a = programs[stream][position];
    if (a.kind != Action::kWait || !layout.is_flag(a.word) || s.words[rank][a.word] == 1) continue;
    State forced = s;
    forced.words[rank][a.word] = 1;
    next.push_back(forced);
  }
  // Handle a call that waits at a closed gate.
  const uint8_t progress = s.progress[rank];
  const int which = progress % 8 == 1 ? 0 : 1;
  if (progress % 2 == 1 && (s.words[rank][which] != 1 || (which == 0 && s.words[rank][1] == 1))) {
    aim = progress;
    if (fault != "one gate") s.words[rank][layout.gate_word(1 - which)] = static_cast<uint8_t>(closed_by(rank));
    s.rescue[rank] = kShut;
    next.push_back(s);
  }
}

void check_end(const State& s) {
  for (int stream = 0; stream < world * streams_of_rank(); ++stream)
    if (s.positions[stream] != programs[stream].size()) wrong = "streams that nothing lets go on";
  if (s.given > 0 || !wrong.empty()) return;
  const State before = first();
  const Layout layout(world, 0, 0);
  for (int rank = 0; rank < world; ++rank)
    for (int word = 0; word < layout.total_words(); ++word) {
      const bool cleared_later = word >= layout.arrived_word(0, 0) && word < layout.arrived_word(kChannels, 0);
      if (s.words[rank][word] != before.words[rank][word] && !cleared_later)
        wrong = "words that are not what they were before";
    }
}

std::vector<State> successors(const State& state) {
  std::vector<State> next;
  for (int stream = 0; stream < world * streams_of_rank(); ++stream) {
    const auto& program = programs[stream];
    const uint8_t position = state.positions[stream];
    if (position == program.size()) continue;
    State s = state;
    if (!advance(s, stream)) continue;
    if (!wrong.empty()) return {};
    // Actions invisible to others commute with all: take them alone, to reduce the states.
    const Action::Kind kind = program[position].kind;
    if (kind == Action::kRecord || kind == Action::kWaitEvent || kind == Action::kDeliver) return {s};
    next.push_back(s);
  }
  for (int rank = 0; rank < world; ++rank) rescues(state, rank, next);
  return next;
}

long all_orders() {
  std::unordered_set<size_t> seen;  // hashes
  std::vector<State> stack{first()};
  while (!stack.empty() && wrong.empty()) {
    const State state = stack.back();
    stack.pop_back();
    std::vector<State> next = successors(state);
    if (wrong.empty() && next.empty()) check_end(state);
    for (const State& s : next)
      if (seen.insert(std::hash<std::string_view>()({reinterpret_cast<const char*>(&s), sizeof s})).second)
        stack.push_back(s);
  }
  return static_cast<long>(seen.size());
}

long random_walks(int walks) {
  std::mt19937 chance(1);
  long steps = 0;
  for (int walk = 0; walk < walks && wrong.empty(); ++walk) {
    State state = first();
    // Random speeds of ranks, in every other walk of streams, too: equal chances would keep all close together.
    const auto draw = [&] { return std::pow(10.0, -2.0 * std::generate_canonical<double, 20>(chance)); };
    std::vector<double> pace(world * streams_of_rank());
    for (int rank = 0; rank < world; ++rank) {
      const double of_rank = draw();
      for (int stream = 0; stream < streams_of_rank(); ++stream)
        pace[rank * streams_of_rank() + stream] = walk % 2 == 0 ? of_rank : of_rank * draw();
    }
    while (wrong.empty()) {
      std::vector<State> next = successors(state);
      if (!wrong.empty()) break;
      if (next.empty()) {
        check_end(state);
        break;
      }
      State chosen = next[chance() % next.size()];
      for (int tries = 0; tries < 20; ++tries) {
        int mover = 0;
        for (int rank = 0; rank < world; ++rank)
          for (int stream = rank * streams_of_rank(); stream < (rank + 1) * streams_of_rank(); ++stream)
            if (chosen.positions[stream] != state.positions[stream]) mover = stream;
        if (std::generate_canonical<double, 20>(chance) < pace[mover]) break;
        chosen = next[chance() % next.size()];
      }
      state = chosen;
      ++steps;
    }
  }
  return steps;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 6) return 2;
  world = std::atoi(arguments[1]);
  script = arguments[2];
  calls = static_cast<int>(script.size());
  givers = std::atoi(arguments[3]);
  fault = arguments[4];
  const int walks = std::atoi(arguments[5]);
  if (world < 1 || world > kMostRanks || calls > kMostCalls) return 2;
  build();
  const long explored = walks == 0 ? all_orders() : random_walks(walks);
  std::printf("%ld %s\n", explored, wrong.c_str());
  return wrong.empty() ? 0 : 1;
}
