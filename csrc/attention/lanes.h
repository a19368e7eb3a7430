// GenericLanes: SIMD vectors of fp32 or fp64 by the compiler's vector extensions, for any CPU. The Lanes types of
// kernels_<isa>.cpp derive from it and override operations that the instruction set does faster.
//
// A Lanes type also configures matrix products (product.h): Operand is the element type of the inputs, kPair the number
// of products that one multiply-add sums per lane, and kRows x kVectors the register tile.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "half.h"

namespace fused_tp::attention {
namespace {

template <class L, typename... Rest>
inline typename L::Vector horner(typename L::Vector x, double highest, Rest... rest) {
  typename L::Vector sum = L::broadcast(static_cast<typename L::Real>(highest));
  ((sum = L::fma(sum, x, L::broadcast(static_cast<typename L::Real>(rest)))), ...);
  return sum;
}

// 2^x on [-1/2, 1/2]. fp32: minimax polynomial 1 + x P(x), relative error at most 9e-8. fp64: Taylor series.
template <class L>
inline typename L::Vector exp2_fraction(typename L::Vector x) {
  if constexpr (sizeof(typename L::Real) == 4) {
    return horner<L>(x, 0.0013264766665818848, 0.009671511452609622, 0.05550733599271014, 0.24022242111755765,
                     0.6931469777188304, 1.0);
  } else {
    return horner<L>(x, 1.3691488853904124e-12, 2.5678435993488196e-11, 4.44553827187081e-10, 7.054911620801121e-09,
                     1.0178086009239696e-07, 1.3215486790144305e-06, 1.5252733804059838e-05, 0.00015403530393381606,
                     0.0013333558146428441, 0.009618129107628477, 0.055504108664821576, 0.2402265069591007,
                     0.6931471805599453, 1.0);
  }
}

// tanh(x) in fp32: x + x^3 P(x^2) below 0.6 (relative error at most 3e-9), else 1 - 2 / (e^2x + 1).
template <class L>
inline typename L::Vector tanh_single(typename L::Vector x) {
  using Vector = typename L::Vector;
  const Vector magnitude = L::max(x, -x), square = x * x;
  const Vector inner = L::fma(x * square,
                              horner<L>(square, -0.005905867423758888, 0.020805383843692706, -0.053786683385498496,
                                        0.13331958241007352, -0.3333329927202725),
                              x);
  // tanh rounds to 1 from 20 on, so larger values need not overflow exp2. The comparison is false for NaN, which stays.
  const Vector bounded = L::select(L::greater(magnitude, L::broadcast(20)), L::broadcast(20), magnitude);
  const Vector power = L::exp2(bounded * L::broadcast(2.8853900817779268f));
  const Vector outer = L::broadcast(1) - L::broadcast(2) / (power + L::broadcast(1));
  const Vector with_sign = L::select(L::greater(L::zero(), x), -outer, outer);
  return L::select(L::greater(L::broadcast(0.6f), magnitude), inner, with_sign);
}

template <typename RealType, int kBytes>
struct GenericLanes {
  using Real = RealType;
  using Operand = Real;
  using Integer = std::conditional_t<sizeof(Real) == 4, int32_t, int64_t>;
  static constexpr int kWidth = kBytes / sizeof(Real);
  static constexpr int kPair = 1;
  static constexpr int kRows = 4;
  static constexpr int kVectors = 3;
  typedef Real Vector __attribute__((vector_size(kBytes)));
  typedef Integer Integers __attribute__((vector_size(kBytes)));
  using Mask = Integers;
  using Operands = Vector;  // the kPair operands of every lane

  // Not x + Vector{}: compilers remove x - 0, but not x + 0, because it turns -0 into 0.
  static Vector broadcast(Real x) { return x - Vector{}; }
  static Vector zero() { return Vector{}; }
  static Vector load(const Real* p) {
    Vector v{};
    std::memcpy(&v, p, sizeof v);
    return v;
  }
  static void store(Real* p, Vector v) { std::memcpy(p, &v, sizeof v); }
  static Integers load_integers(const int32_t* p) {
    Integers v{};
    for (int i = 0; i < kWidth; ++i) v[i] = p[i];
    return v;
  }
  static Vector fma(Vector a, Vector b, Vector c) { return a * b + c; }
  // Returns b if a or b is NaN.
  static Vector max(Vector a, Vector b) { return a > b ? a : b; }
  static Vector select(Mask mask, Vector a, Vector b) { return mask ? a : b; }
  static Mask greater(Vector a, Vector b) { return a > b; }
  static Mask equal(Vector a, Vector b) { return a == b; }
  static bool any(Mask mask) {
    bool is_any_set = false;
    for (int i = 0; i < kWidth; ++i) is_any_set |= mask[i] != 0;
    return is_any_set;
  }
  // Lanes with starts <= k < stops.
  static Mask in_interval(Integers starts, Integers stops, int32_t k) {
    const Integers at = Integers{} + k;
    return (starts <= at) & (stops > at);
  }
  static Vector distance(Integers q_positions, int32_t k) {
    const Integers d = q_positions - k;
    return __builtin_convertvector(d < 0 ? -d : d, Vector);
  }
  static Real sum(Vector v) {
    Real total = 0;
    for (int i = 0; i < kWidth; ++i) total += v[i];
    return total;
  }

  // 2^x with an error of about one ulp; 0 if the result is subnormal. x must be below 127 (fp64: 1023).
  static Vector exp2(Vector x) {
    constexpr bool kSingle = sizeof(Real) == 4;
    constexpr Real kLowest = kSingle ? -126 : -1022, kHighest = kSingle ? 127 : 1023;
    const Mask underflow = x < broadcast(kLowest);
    Vector y = underflow ? broadcast(kLowest) : x;
    y = y > kHighest ? broadcast(kHighest) : y;
    // Adding 1.5 * 2^(mantissa bits) rounds y to an integer, which is then in the low bits of the mantissa.
    const Vector magic = broadcast(kSingle ? Real(12582912.0) : Real(6755399441055744.0));
    const Vector shifted = y + magic;
    const Vector fraction = y - (shifted - magic);
    const Integers rounded = (Integers)shifted - (Integers)magic;
    const Vector power = (Vector)((rounded + (kSingle ? 127 : 1023)) << (kSingle ? 23 : 52));
    const Vector result = exp2_fraction<GenericLanes>(fraction) * power;
    return underflow ? Vector{} : result;
  }

  static Vector tanh(Vector x) {
    if constexpr (sizeof(Real) == 4) {
      return tanh_single<GenericLanes>(x);
    } else {
      Vector result{};
      for (int i = 0; i < kWidth; ++i) result[i] = std::tanh(x[i]);
      return result;
    }
  }

  // High and low 32 bits of the products of 32-bit lanes with a constant, for Philox.
  static void multiply_wide(Integers a, uint32_t b, Integers& high, Integers& low) {
    for (int i = 0; i < kWidth; ++i) {
      const uint64_t product = static_cast<uint64_t>(static_cast<uint32_t>(a[i])) * b;
      high[i] = static_cast<Integer>(product >> 32);
      low[i] = static_cast<Integer>(product & 0xffffffffu);
    }
  }
  // Lanes whose low 32 bits, as an unsigned number, are at least `threshold`.
  static Mask at_least(Integers bits, uint32_t threshold) {
    Mask mask{};
    for (int i = 0; i < kWidth; ++i) mask[i] = static_cast<uint32_t>(bits[i]) >= threshold ? -1 : 0;
    return mask;
  }

  static Vector load_operand(const Operand* p) { return load(p); }
  static Vector broadcast_operand(const Operand* p) { return broadcast(*p); }
  static Vector multiply_add(Vector a, Vector b, Vector c) { return fma(a, b, c); }
  static Real value(Operand x) { return x; }
  // If kTransposes: to[j][i] = from[i][j] for a 16 x 16 square of 4-byte elements; strides in elements.
  static constexpr bool kTransposes = false;
  static void transpose(const uint32_t*, int64_t, uint32_t*, int64_t) {}
  // Store vector a of row 0 and vector b of row 1. store_rows: in separate rows. store_pairs: as B in product.h.
  static void store_rows(Operand* row0, Operand* row1, Vector a, Vector b) {
    store(row0, a);
    store(row1, b);
  }
  static void store_pairs(Operand* rows, int64_t row_length, Vector a, Vector b) {
    store_rows(rows, rows + row_length, a, b);
  }
};

}  // namespace
}  // namespace fused_tp::attention
