// Attention of odd shapes and masks, and products of few rows, with threaded threads, from threaded callers: for
// sanitizers. Arguments are heap allocations of exact size; the exit status reports the sanitizers' findings.
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "attention/attention.h"
#include "attention/kernels.h"
#include "half.h"
#include "matmul/few_rows.h"

using namespace fused_tp;
using namespace fused_tp::attention;

namespace {

struct Case {
  Shape shape;
  DType dtype;
  double softcap;
  bool slopes, dropout;
  int window;  // keys before its own position to which a query attends; < 0: all of them
};

std::vector<char> random_elements(int64_t count, DType dtype, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<char> made(count * element_size(dtype));
  for (int64_t i = 0; i < count; ++i) {
    const float value = static_cast<float>(random() % 2001) / 1000.0f - 1.0f;
    const auto put = [&](auto element) { std::memcpy(made.data() + i * sizeof element, &element, sizeof element); };
    if (dtype == DType::kF64) put(static_cast<double>(value));
    if (dtype == DType::kF32) put(value);
    if (dtype == DType::kBF16) put(f32_to_bf16(value));
    if (dtype == DType::kF16) put(f32_to_f16(value));
  }
  return made;
}

// Concatenates all results.
template <typename Real>
std::vector<Real> run(const Case& test_case, int threads, const char* isa) {
  const Shape& s = test_case.shape;
  std::vector<int32_t> starts(s.rows), stops(s.rows), q_positions(s.rows), q_indices(s.rows), k_indices(s.keys);
  for (int64_t i = 0; i < s.rows; ++i) {
    const int64_t position = i + s.keys - s.rows;
    q_positions[i] = static_cast<int32_t>(position);
    q_indices[i] = static_cast<int32_t>(3 * i);
    stops[i] = static_cast<int32_t>(std::max<int64_t>(0, position + 1));
    starts[i] = static_cast<int32_t>(test_case.window < 0 ? 0 : std::max<int64_t>(0, position - test_case.window));
  }
  for (int64_t j = 0; j < s.keys; ++j) k_indices[j] = static_cast<int32_t>(j < s.keys / 2 ? j : j + 5);

  const int64_t q_count = s.batch * s.rows * s.heads, k_count = s.batch * s.keys * s.kv_heads;
  const auto q = random_elements(q_count * s.dim, test_case.dtype, 1),
             k = random_elements(k_count * s.dim, test_case.dtype, 2);
  const auto v = random_elements(k_count * s.v_dim, test_case.dtype, 3),
             g = random_elements(q_count * s.v_dim, test_case.dtype, 4);
  const auto dense = [](int64_t rows, int64_t heads, int64_t dim) {
    return Strides{rows * heads * dim, heads * dim, dim};
  };
  const Strides per_row{s.heads * s.rows, 1, s.rows};
  std::vector<Real> slopes(s.heads, Real(0.05)), acc(q_count * s.v_dim), row_sum(q_count), lse(q_count), delta(q_count);
  std::vector<Real> row_max(q_count, -static_cast<Real>(INFINITY));
  std::vector<Real> dq(q_count * s.dim), dk(k_count * s.dim), dv(k_count * s.v_dim), d_slopes(s.heads);

  Problem problem{};
  problem.shape = s;
  problem.intervals = {starts.data(), stops.data(), q_positions.data(), q_indices.data(), k_indices.data()};
  problem.score_parameters = {0.2,
                              test_case.softcap,
                              test_case.slopes ? slopes.data() : nullptr,
                              test_case.dropout,
                              1u << 30,
                              4.0 / 3,
                              0x123456789ull,
                              2};
  problem.dtype = test_case.dtype;
  problem.q = {q.data(), dense(s.rows, s.heads, s.dim)};
  problem.k = {k.data(), dense(s.keys, s.kv_heads, s.dim)};
  problem.v = {v.data(), dense(s.keys, s.kv_heads, s.v_dim)};
  const AccumulatorView out{acc.data(), dense(s.rows, s.heads, s.v_dim)};
  forward({problem, out, {row_max.data(), per_row}, {row_sum.data(), per_row}}, threads, isa);
  for (int64_t i = 0; i < q_count; ++i) lse[i] = row_max[i] + std::log(row_sum[i]);
  BackwardProblem backward_problem{};
  static_cast<Problem&>(backward_problem) = problem;
  backward_problem.grad_out = {g.data(), out.strides};
  backward_problem.lse = {lse.data(), per_row};
  backward_problem.delta = {delta.data(), per_row};
  backward_problem.dq = {dq.data(), problem.q.strides};
  backward_problem.dk = {dk.data(), problem.k.strides};
  backward_problem.dv = {dv.data(), problem.v.strides};
  backward_problem.d_slopes = test_case.slopes ? d_slopes.data() : nullptr;
  backward(backward_problem, threads, isa);
  std::vector<Real> all;
  for (const auto* part : {&acc, &row_max, &row_sum, &dq, &dk, &dv, &d_slopes})
    all.insert(all.end(), part->begin(), part->end());
  return all;
}

template <typename Real>
bool results_are_equal(const Case& test_case, int threads, const char* isa) {
  const std::vector<Real> single = run<Real>(test_case, 1, isa), threaded = run<Real>(test_case, threads, isa);
  return std::memcmp(single.data(), threaded.data(), single.size() * sizeof(Real)) == 0;
}

bool is_reproducible(const Case& test_case, int threads, const char* isa) {
  const bool passed = test_case.dtype == DType::kF64 ? results_are_equal<double>(test_case, threads, isa)
                                                     : results_are_equal<float>(test_case, threads, isa);
  if (!passed) std::printf("%s, %s: other bits with %d threads\n", isa, dtype_name(test_case.dtype), threads);
  return passed;
}

// Products of few rows: whole and partial tiles and steps; rows end where the allocation ends.
bool few_rows_are_reproducible(const char* isa) {
  bool passed = true;
  for (const DType dtype : {DType::kF32, DType::kBF16})
    for (const auto& [rows, columns, depth] : {std::array<int64_t, 3>{1, 1, 1}, {16, 211, 2085}, {5, 100, 31}, {matmul::kMaxFewRows, 50, 65}}) {
      if (*matmul::few_rows_isa(dtype, isa) == '\0') continue;
      const auto x = random_elements(rows * depth, dtype, 1), w = random_elements(columns * depth, dtype, 2);
      const auto bias = random_elements(columns, dtype, 3);
      std::vector<char> single(rows * columns * element_size(dtype)), threaded = single;
      matmul::Problem problem{x.data(),      depth, w.data(), depth, bias.data(),
                                     single.data(), rows,  columns,  depth, dtype};
      matmul::few_rows(problem, 1, isa);
      problem.y = threaded.data();
      matmul::few_rows(problem, 3, isa);
      passed &= single == threaded;
    }
  if (!passed) std::printf("%s: few rows have other bits with threaded threads\n", isa);
  return passed;
}

}  // namespace

int main() {
  const Case cases[] = {
      {{1, 2, 1, 130, 131, 17, 33}, DType::kF32, 0, false, false, -1},
      {{2, 3, 3, 49, 65, 16, 16}, DType::kBF16, 0, false, false, 20},
      {{1, 1, 1, 1, 1, 1, 1}, DType::kBF16, 5, true, true, -1},
      {{1, 4, 2, 70, 40, 31, 7}, DType::kF16, 3, true, true, -1},
      {{1, 2, 2, 50, 70, 9, 20}, DType::kF64, 3, true, true, 11},
      {{1, 2, 1, 800, 90, 8, 8}, DType::kF32, 0, true, false, -1},
  };
  bool passed = true;
  for (const char* isa : {"plain", "avx2", "avx512", "avx512_bf16"}) {
    for (const Case& test_case : cases) passed &= is_reproducible(test_case, 3, isa);
    passed &= few_rows_are_reproducible(isa);
  }
  bool caller_results[3] = {};
  std::vector<std::thread> callers;
  for (int i = 0; i < 3; ++i)
    callers.emplace_back(
        [&, i] { caller_results[i] = is_reproducible(cases[i], 2, "plain") && is_reproducible(cases[i + 1], 3, ""); });
  for (std::thread& caller : callers) caller.join();
  for (const bool single : caller_results) passed &= single;
  return passed ? 0 : 1;
}
