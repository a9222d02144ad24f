// The threads of a block, as a block program sees them.
//
// A program is a template over its Block. CUDA runs it with Cuda blocks; the CPU kernel is the same
// program with one thread per block, whose values are vectors; a test runs it with several real
// threads under ThreadSanitizer, which detects a missing sync(). A Block has
//   Value, LANES       what a thread works on at a time, and how many columns that is
//   UNROLL             how many of them it loads ahead
//   row_stride(width)  floats from one row of a tile to the next
//   thread, threads    this thread in its block
//   team, teams        its team (a warp), and the number of teams: a team shares a row
//   lane, lanes        this thread in its team
//   sync()             wait for all threads of the block
//   team_sync()        wait for those of the team
//   will_read(address), will_write(address)    prefetch hints
//   team_sum(x), team_max(x)    over the threads of a team; every thread gets the result
//   team_sum_before(n)          over the threads before this one in its team
//   add(counter, n)    atomic, to a counter that threads share
#pragma once

#include "values.h"

namespace fastaug {

// Sum over the threads of the block; every thread gets the result. scratch: one float per team,
// unused since the last sync(), and usable again after the next one.
template <class Block>
FASTAUG_FUNCTION float block_sum(Block& block, float x, float* scratch) {
  x = block.team_sum(x);
  if (block.lane == 0) scratch[block.team] = x;
  block.sync();
  float sum = 0;
  FASTAUG_ROLLED
  for (int team = 0; team < block.teams; ++team) sum += scratch[team];
  return sum;
}

template <class Block>
FASTAUG_FUNCTION float block_max(Block& block, float x, float* scratch) {
  x = block.team_max(x);
  if (block.lane == 0) scratch[block.team] = x;
  block.sync();
  float top = scratch[0];
  FASTAUG_ROLLED
  for (int team = 1; team < block.teams; ++team) top = maximum(top, scratch[team]);
  return top;
}

#ifdef __CUDACC__

struct Cuda {
  typedef float Value;
  static constexpr int LANES = 1;
  static __device__ int row_stride(int width) { return width; }
  static constexpr int UNROLL = 8;  // loads in flight, to hide the latency of memory
  int thread = threadIdx.x, threads = blockDim.x;
  int team = threadIdx.x / 32, teams = blockDim.x / 32;
  int lane = threadIdx.x % 32;
  static constexpr int lanes = 32;

  __device__ void sync() { __syncthreads(); }
  __device__ void team_sync() { __syncwarp(); }
  __device__ void will_read(const void*) {}
  __device__ void will_write(const void*) {}
  __device__ void add(int* counter, int n) { atomicAdd(counter, n); }
  template <class Number>
  __device__ Number team_sum(Number x) {
    for (int step = 16; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
  }
  __device__ float team_max(float x) {
    for (int step = 16; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
  }
  __device__ int team_max(int x) {
    for (int step = 16; step; step /= 2) x = max(x, __shfl_xor_sync(~0u, x, step));
    return x;
  }
  __device__ int team_sum_before(int n) {
    int sum = n;
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(~0u, sum, step);
      sum += lane >= step ? before : 0;
    }
    return sum - n;
  }
};

#else

struct OneThread {
  typedef floats Value;
  static constexpr int LANES = fastaug::LANES;
  // An odd number of vectors: a column of rows 4 KB apart would fall into one set of the cache.
  static int row_stride(int width) { return (width / LANES | 1) * LANES; }
  static constexpr int UNROLL = 4;
  static constexpr int thread = 0, threads = 1, team = 0, teams = 1, lane = 0, lanes = 1;
  void sync() {}
  void team_sync() {}
  // Loads overlap with arithmetic: 1.4 times faster where logits are not in the cache.
  void will_read(const void* address) { __builtin_prefetch(address, 0, 2); }
  void will_write(const void* address) { __builtin_prefetch(address, 1, 3); }
  void add(int* counter, int n) { *counter += n; }
  template <class Number>
  Number team_sum(Number x) { return x; }
  template <class Number>
  Number team_max(Number x) { return x; }
  int team_sum_before(int) { return 0; }
};

#endif

}  // namespace fastaug
