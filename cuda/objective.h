// The objective of one image and its gradient, as a block program: logits [K, C] in, the negative
// log-likelihood, the mean KL over ordered pairs of views, and d(nll + kl_weight * kl)/d logits out.
//
// Names: z logits, p = softmax(z) of a view, lp = log p; k is a view (a row), c a class (a column).
//   u_c = mean_k lp_kc     r_c = exp(u_c)     d_kc = lp_kc - u_c     x_kc = p_kc - r_c
//   kl  = 1/(K-1) sum_kc x_kc d_kc
// All K^2 pairs are in this sum, which is linear in K, and each of its terms is >= 0. d is made of
// differences between views, and x of d where d is small: nothing cancels. So the fp32 KL is accurate
// to 1e-6 of its value where not one digit of the shorter form, sum p (z - mean z), is right.
//
//   nll = -sum_c q_c s_c, q the smoothed target; s_c = u_c where losses are averaged,
//   log mean_k p_kc for probabilities, u_c - log sum_c exp(u_c) for logits.
// A target is a class, or one number for each class (soft). The sum of q is then any number.
//
// The gradient goes through v = d(nll + kl_weight kl)/d lp and the Jacobian of log softmax:
//   grad_kc = v_kc - p_kc sum_c v_kc
// The part of v that all views of a column share is stored once, as `common`.
//
// A chunk of columns of all views is in shared memory (on a CPU: in cache). If it holds all C
// classes, logits are read once and nothing is computed twice; else chunks are loaded three times:
// for the row sums of exp(z), for kl, nll and the row sums of v, and for the gradient.
#pragma once

#include "block.h"

namespace fastaug {

// fastaug/kernels reads these codes by name, from `Average` in fastaug/kernels/config.py. NONE: only
// the regularizer, without targets. X is applied to each, for the functions that are compiled.
enum Average { LOSSES, PROBS, LOGITS, NONE };
#define FASTAUG_AVERAGES_OF_TARGETS(X, ...) \
  X(losses, LOSSES, __VA_ARGS__) X(probs, PROBS, __VA_ARGS__) X(logits, LOGITS, __VA_ARGS__)
#define FASTAUG_AVERAGES(X, ...) \
  FASTAUG_AVERAGES_OF_TARGETS(X, __VA_ARGS__) X(none, NONE, __VA_ARGS__)

// FLOOR stands in for -inf, so that differences are finite: a class at -inf in all views then has
// p = r = 0 and contributes nothing. Values beyond LIMIT come from it, and mean infinity.
constexpr float FLOOR = -1e30f, LIMIT = 1e12f;

struct Shape {
  int views, classes;
  int width;  // columns of a chunk, a multiple of Block::LANES
};

struct Weights {
  float kl, smoothing;
  float gradient = 1;  // factor on the gradient as it is written
};

// Offsets in shared memory, in floats. fastaug/kernels/cuda.py computes the same size.
struct Layout {
  int stride, z, e, common, u, top, log_sum, inverse_sum, delta, v_sum, scratch, size;
  FASTAUG_METHOD Layout(int views, int width, int teams, int row_stride) {
    stride = row_stride;
    z = 0;
    e = z + views * stride;
    common = e + views * stride;
    u = common + width;
    top = u + width;
    log_sum = top + views;
    inverse_sum = log_sum + views;
    delta = inverse_sum + views;
    v_sum = delta + views;
    scratch = v_sum + views;
    size = scratch + 5 * teams;
  }
};

// A target is a class, or a number for each class. Given: what a program gets for an image, by value,
// so that the code for classes is the same as without soft targets.
struct ClassTarget {
  typedef long long Stored, Given;  // of all images: [B]
  static constexpr bool SOFT = false;
  static FASTAUG_METHOD Given of(const Stored* targets, long long b, int) { return targets[b]; }
  int index;  // -1: not a class
  FASTAUG_METHOD ClassTarget(Given target, int classes)
      : index(target >= 0 && target < classes ? (int)target : -1) {}
};
struct SoftTarget {
  typedef float Stored;  // of all images: [B, C]
  typedef const float* Given;
  static constexpr bool SOFT = true;
  static FASTAUG_METHOD Given of(const Stored* targets, long long b, int classes) {
    return targets + b * classes;
  }
  Given row;
  FASTAUG_METHOD SoftTarget(Given target, int) : row(target) {}
};

template <class Block, class T, Average AVERAGE, class Target = ClassTarget>
class Objective {
  typedef typename Block::Value Value;
  static constexpr int LANES = Block::LANES;
  static constexpr bool SOFT = Target::SOFT;

 public:
  // logits: of the first view; view_stride: elements between views; gradient: [K, C], or null for
  // only the values; next_logits: of the next image of this thread, or null. A target that is not a
  // class gives nll = NaN.
  FASTAUG_METHOD Objective(Block& block, Shape shape, Weights weights, const T* logits,
                           long long view_stride, typename Target::Given target, T* gradient,
                           float* shared, const T* next_logits = nullptr)
      : block(block), K(shape.views), C(shape.classes), width(shape.width), weights(weights),
        logits(logits), view_stride(view_stride),
        target(target, shape.classes), gradient(gradient),
        at(shape.views, shape.width, block.teams, Block::row_stride(shape.width)), shared(shared),
        next_logits(next_logits) {}

  FASTAUG_METHOD void run(float* nll, float* kl) {
    const bool whole = C <= width;
    if (whole) {
      load_and_sum_rows();
    } else {
      sum_rows();
    }
    block.sync();
    center_rows();
    block.sync();

    Sums sums;
    for (int first = 0; first < C; first += width) {
      if (!whole) load_chunk(first);
      columns(first, sums);
      block.sync();
      if (gradient && !whole) sum_rows_of_v(first);
    }
    const Totals totals = finish(sums, nll, kl);
    if (!gradient) return;
    for (int first = 0; first < C; first += width) {
      if (!whole) {
        load_chunk(first);  // no sync before: each thread overwrites only what it has read itself
        Sums again;
        columns(first, again);
        block.sync();
      }
      write_gradient(first, whole, totals);
    }
  }

 private:
  // Sums over the columns of a thread. top, total: the largest u and the sum of exp(u - top);
  // target: of a soft target, where logits are averaged.
  struct Sums {
    Value kl = {}, score = {}, common = {}, top = Value{} + FLOOR, total = {}, target = {};
  };
  struct Totals {
    float common, log_total, target;
  };

  Block& block;
  const int K, C, width;
  const Weights weights;
  const T* const logits;
  const long long view_stride;
  const Target target;
  T* const gradient;
  const Layout at;
  float* const shared;
  const T* const next_logits;

  // On a GPU, 16 bytes of a row of logits or of the gradient are loaded and stored at a time, if
  // the row begins at a multiple of 16 bytes, and if the rows of tiles do too.
  static constexpr int SOME = 16 / sizeof(T);
  struct alignas(16) Pack { T numbers[SOME]; };
  struct alignas(16) Four { float numbers[4]; };
  // How many columns of a row are in packs.
  FASTAUG_METHOD int packed_columns(const T* row) const {
    if (LANES > 1 || (unsigned long long)row % 16 || at.stride % 4) return 0;
    return C / SOME * SOME;
  }
  FASTAUG_METHOD Four& four(int tile, int k, int c) const {
    return *(Four*)(shared + tile + k * at.stride + c);
  }

  FASTAUG_METHOD int columns_here(int first) const {
    return C - first < width ? C - first : width;
  }
  FASTAUG_METHOD Value& cell(int tile, int k, int c) const {
    return *(Value*)(shared + tile + k * at.stride + c);
  }
  FASTAUG_METHOD Value& column(int of, int c) const { return *(Value*)(shared + of + c); }
  FASTAUG_METHOD Value logit(int k, int c) const {
    return maximum(Value{} + FLOOR, load(logits + k * view_stride + c, C - c, FLOOR));
  }
  FASTAUG_METHOD float row(int of, int k) const { return shared[of + k]; }

  // Tiles z and e = exp(z - top), and the input of center_rows. Each row has one team: no sync.
  FASTAUG_METHOD void load_and_sum_rows() {
    constexpr int UNROLL = Block::UNROLL;
    const int step = block.lanes * LANES;
    for (int k = block.team; k < K; k += block.teams) {
      Value top = Value{} + FLOOR, sum = {};
      const int packed = packed_columns(logits + k * view_stride);
      if constexpr (LANES == 1) {
        FASTAUG_ROLLED
        for (int c = SOME * block.lane; c < packed; c += SOME * block.lanes) {
          const Pack some = *(const Pack*)(logits + k * view_stride + c);
          for (int i = 0; i < SOME; i += 4) {
            Four z;
            for (int j = 0; j < 4; ++j) {
              z.numbers[j] = maximum(FLOOR, to_float(some.numbers[i + j]));
              top = maximum(top, z.numbers[j]);
            }
            four(at.z, k, c + i) = z;
          }
        }
      }
      for (int c = packed + block.lane * LANES; c < C; c += UNROLL * step) {
        Value z[UNROLL];
        for (int i = 0; i < UNROLL; ++i)
          if (c + i * step < C) z[i] = logit(k, c + i * step);
        for (int i = 0; i < UNROLL; ++i)
          if (c + i * step < C) {
            top = maximum(top, z[i]);
            cell(at.z, k, c + i * step) = z[i];
          }
      }
      const float row_top = block.team_max(lane_max(top));
      if (packed) block.team_sync();  // a thread sums other columns than those that it has loaded
      for (int c = block.lane * LANES; c < C; c += step) {
        const Value e = exponential(cell(at.z, k, c) - row_top);
        cell(at.e, k, c) = e;
        sum += e;
      }
      keep_row(k, row_top, block.team_sum(lane_sum(sum)));
    }
  }

  // The same sums in one pass, for logits that do not fit into shared memory.
  FASTAUG_METHOD void sum_rows() {
    constexpr int UNROLL = Block::UNROLL;
    const int step = block.lanes * LANES;
    for (int k = block.team; k < K; k += block.teams) {
      Value top = Value{} + FLOOR, sum = {};
      for (int c = block.lane * LANES; c < C; c += UNROLL * step) {
        Value z[UNROLL], largest = top;
        for (int i = 0; i < UNROLL; ++i) {
          z[i] = c + i * step < C ? logit(k, c + i * step) : Value{} + FLOOR;
          largest = maximum(largest, z[i]);
        }
        sum *= exponential(top - largest);
        for (int i = 0; i < UNROLL; ++i) sum += exponential(z[i] - largest);
        top = largest;
      }
      const float row_top = block.team_max(lane_max(top));
      keep_row(k, row_top, block.team_sum(lane_sum(sum * exponential(top - row_top))));
    }
  }

  FASTAUG_METHOD void keep_row(int k, float top, float sum) {
    if (block.lane != 0) return;
    if (top == FLOOR) sum = not_a_number();  // a view without any class
    shared[at.top + k] = top;
    shared[at.log_sum + k] = logf(sum);
    shared[at.inverse_sum + k] = 1 / sum;
    shared[at.v_sum + k] = 0;
  }

  // log sum_c exp(z_kc) above view 0's largest logit: exact under an offset that is common to all.
  FASTAUG_METHOD float offset(int k) const {
    return (row(at.top, k) - row(at.top, 0)) + row(at.log_sum, k);
  }
  FASTAUG_METHOD float mean_offset() const {
    float sum = 0;
    FASTAUG_ROLLED
    for (int k = 0; k < K; ++k) sum += offset(k);
    return sum / K;
  }
  FASTAUG_METHOD void center_rows() {
    const float mean = mean_offset();
    FASTAUG_ROLLED
    for (int k = block.thread; k < K; k += block.threads) shared[at.delta + k] = offset(k) - mean;
  }

  FASTAUG_METHOD void load_chunk(int first) {
    const int here = columns_here(first);
    for (int k = block.team; k < K; k += block.teams)
      for (int c = block.lane * LANES; c < here; c += block.lanes * LANES) {
        const Value z = logit(k, first + c);
        cell(at.z, k, c) = z;
        cell(at.e, k, c) = exponential(z - row(at.top, k));
      }
    block.sync();
  }

  FASTAUG_METHOD Value smoothed_target(int c) const {
    const float other = weights.smoothing / C;
    if constexpr (SOFT)
      return load(target.row + c, C - c, 0) * (1 - weights.smoothing) +
             numbered<Value>(c, -1, C, other, other);
    else
      return numbered<Value>(c, target.index, C, other + (1 - weights.smoothing), other);
  }
  // 0 times infinity is 0 here. A soft target may be so small that its product with FLOOR, which
  // stands in for infinity, is no more beyond LIMIT.
  FASTAUG_METHOD static Value weighted(Value q, Value score) {
    if constexpr (!SOFT) return q * score;
    const Value at_infinity = q == 0.f ? Value{} : q * -infinite();
    return score < -LIMIT ? at_infinity : q * score;
  }
  FASTAUG_METHOD Value log_p(int k, int c) const {
    return (cell(at.z, k, c) - row(at.top, k)) - row(at.log_sum, k);
  }

  FASTAUG_METHOD float kl_share() const { return K > 1 ? weights.kl / (K - 1) : 0; }
  // Factor between tile e and v; the multiplication is cheaper where the gradient is written.
  FASTAUG_METHOD float v_scale() const { return AVERAGE == PROBS ? 1 : kl_share(); }

  // Tile z becomes p; tile e becomes v, without its scale and without the common part of the views.
  FASTAUG_METHOD void columns(int first, Sums& sums) {
    const int here = columns_here(first);
    const float mean = mean_offset(), base = row(at.top, 0), share = 1.f / K;
    const float kl_share = this->kl_share();
    for (int c = block.thread * LANES; c < here; c += block.threads * LANES) {
      const Value z_0 = cell(at.z, 0, c);
      Value beyond = {};  // the mean of z, beyond z_0
      for (int k = 1; k < K; ++k) beyond += cell(at.z, k, c) - z_0;
      beyond *= share;
      const Value u = ((z_0 - base) + beyond) - mean, r = exponential(u);
      const Value q = AVERAGE == NONE ? Value{} : smoothed_target(first + c);

      Value score = u, largest_p = {}, ratio_share = {};
      if (AVERAGE == PROBS) {  // e: p over the column's largest, because p itself may underflow
        Value top = Value{} + FLOOR, sum = {};
        for (int k = 0; k < K; ++k) top = maximum(top, log_p(k, c));
        for (int k = 0; k < K; ++k) {
          const Value e = exponential(log_p(k, c) - top);
          cell(at.e, k, c) = e;
          sum += e;
        }
        largest_p = exponential(top);
        score = top + logarithm(sum * share);
        ratio_share = q / sum;
      }
      if (AVERAGE == LOGITS) {
        const Value largest = maximum(sums.top, u);
        sums.total = sums.total * exponential(sums.top - largest) + exponential(u - largest);
        sums.top = largest;
        column(at.u, c) = u;
        if constexpr (SOFT) sums.target += q;
      }
      if (AVERAGE != NONE) sums.score += weighted(q, score);

      Value x_sum = {}, kl = {};
      for (int k = 0; k < K; ++k) {
        if (next_logits) block.will_read(next_logits + k * view_stride + first + c);
        const Value d = ((cell(at.z, k, c) - z_0) - beyond) - row(at.delta, k);
        const Value e = cell(at.e, k, c);
        const Value p = e * (AVERAGE == PROBS ? largest_p : Value{} + row(at.inverse_sum, k));
        const Value small = r * small_expm1(d), large = p - r;  // both: a GPU would branch
        const Value x = magnitude(d) < SMALL ? small : large;
        x_sum += x;
        kl += x * d;
        if (gradient) {
          Value v = p * d + x;
          if (AVERAGE == PROBS) v = kl_share * v - ratio_share * e;
          cell(at.z, k, c) = p;
          cell(at.e, k, c) = v;
        }
      }
      sums.kl += kl;
      const Value common = -(kl_share * share) * x_sum - (AVERAGE == LOSSES ? q * share : Value{});
      sums.common += common;
      column(at.common, c) = common;
    }
  }

  FASTAUG_METHOD float sum_row_of_v(int k, int here) const {
    Value sum = {};
    for (int c = block.lane * LANES; c < here; c += block.lanes * LANES) sum += cell(at.e, k, c);
    return block.team_sum(lane_sum(sum));
  }
  FASTAUG_METHOD void sum_rows_of_v(int first) {
    for (int k = block.team; k < K; k += block.teams) {
      const float v_sum = sum_row_of_v(k, columns_here(first));
      if (block.lane == 0) shared[at.v_sum + k] += v_sum;
    }
  }

  FASTAUG_METHOD Totals finish(const Sums& sums, float* nll, float* kl) {
    float* scratch = shared + at.scratch;
    const int next = block.teams;
    const float kl_sum = block_sum(block, lane_sum(sums.kl), scratch);
    const float score = block_sum(block, lane_sum(sums.score), scratch + next);
    const float common = block_sum(block, lane_sum(sums.common), scratch + 2 * next);
    float log_total = 0, target_sum = 1;
    if (AVERAGE == LOGITS) {
      const float top = block_max(block, lane_max(sums.top), scratch + 3 * next);
      const float total = lane_sum(sums.total * exponential(sums.top - top));
      log_total = top + logf(block_sum(block, total, scratch + 4 * next));
      if constexpr (SOFT) target_sum = block_sum(block, lane_sum(sums.target), scratch);
    }
    if (block.thread == 0) {
      if constexpr (SOFT) {
        *nll = target_sum * log_total - score;
      } else {
        const bool is_class = AVERAGE == NONE || target.index >= 0;
        *nll = is_class ? finite_or_infinite(log_total - score) : not_a_number();
      }
      *kl = K > 1 ? finite_or_infinite(kl_sum / (K - 1)) : 0;
    }
    return {common, log_total, target_sum};
  }
  FASTAUG_METHOD static float finite_or_infinite(float x) { return x > LIMIT ? infinite() : x; }

  FASTAUG_METHOD void write_gradient(int first, bool whole, Totals totals) {
    const int here = columns_here(first);
    // (softmax(mean z) sum q - q) / K: the same for all views, and already d/dz
    if (AVERAGE == LOGITS) {
      for (int c = block.thread * LANES; c < here; c += block.threads * LANES) {
        Value g = exponential(column(at.u, c) - totals.log_total);
        if constexpr (SOFT) g *= totals.target;
        column(at.common, c) += (g - smoothed_target(first + c)) * (1.f / K);
      }
      block.sync();
    }
    const float scale = v_scale();
    for (int k = block.team; k < K; k += block.teams) {
      // The sum of a row that is completely loaded is computed here, while the row is in cache.
      const float v_sum =
          (whole ? sum_row_of_v(k, C) : row(at.v_sum, k)) * scale + totals.common;
      T* to = gradient + (long long)k * C + first;
      const int packed = whole ? packed_columns(to) : 0;
      if constexpr (LANES == 1) {
        FASTAUG_ROLLED
        for (int c = SOME * block.lane; c < packed; c += SOME * block.lanes) {
          Pack some;
          for (int i = 0; i < SOME; i += 4) {
            const Four e = four(at.e, k, c + i), p = four(at.z, k, c + i);
            const Four common = *(const Four*)(shared + at.common + c + i);
            for (int j = 0; j < 4; ++j)
              from_float(weights.gradient * ((e.numbers[j] * scale + common.numbers[j]) -
                                             p.numbers[j] * v_sum),
                         some.numbers + i + j);
          }
          store_pack(to + c, some.numbers);
        }
      }
      for (int c = packed + block.lane * LANES; c < here; c += block.lanes * LANES) {
        block.will_write(to + 2 * C + c);  // two rows ahead
        store(to + c, here - c,
              weights.gradient *
                  ((cell(at.e, k, c) * scale + column(at.common, c)) - cell(at.z, k, c) * v_sum));
      }
    }
  }
};

}  // namespace fastaug
