// A block of several real threads, for tests of block programs. Built with ThreadSanitizer, a missing
// sync() is a report; with AddressSanitizer, an access outside of its memory is.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "block.h"

namespace fastaug {

class Barrier {
 public:
  explicit Barrier(int count) : count(count) {}
  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    const int round = rounds;
    if (++arrived == count) {
      arrived = 0;
      ++rounds;
      all_here.notify_all();
    } else {
      all_here.wait(lock, [&] { return round != rounds; });
    }
  }

 private:
  std::mutex mutex;
  std::condition_variable all_here;
  const int count;
  int arrived = 0, rounds = 0;
};

// What the threads of one block share; each team adds and compares in `slots` of its own.
struct Meeting {
  Meeting(int teams, int lanes) : block(teams * lanes), slots(teams * lanes) {
    for (int team = 0; team < teams; ++team) team_barriers.emplace_back(new Barrier(lanes));
  }
  Barrier block;
  std::vector<std::unique_ptr<Barrier>> team_barriers;
  std::vector<double> slots;
};

struct Threaded {
  typedef floats Value;
  static constexpr int LANES = fastaug::LANES;
  static constexpr int UNROLL = 2;
  static int row_stride(int width) { return width; }
  Meeting& meeting;
  const int thread, threads, team, teams, lane, lanes;

  Threaded(Meeting& meeting, int thread, int teams, int lanes)
      : meeting(meeting), thread(thread), threads(teams * lanes), team(thread / lanes),
        teams(teams), lane(thread % lanes), lanes(lanes) {}
  void sync() { meeting.block.wait(); }
  void team_sync() { meeting.team_barriers[team]->wait(); }
  void will_read(const void*) {}
  void will_write(const void*) {}
  void add(int* counter, int n) { __atomic_fetch_add(counter, n, __ATOMIC_RELAXED); }
  // From `start` over the numbers of the first `end` threads of the team, which all call this.
  template <class Number, class Fold>
  Number over_team(Number x, Number start, int end, Fold fold) {
    Barrier& barrier = *meeting.team_barriers[team];
    double* slots = &meeting.slots[team * lanes];
    slots[lane] = (double)x;
    barrier.wait();
    Number result = start;
    for (int i = 0; i < end; ++i) result = fold(result, (Number)slots[i]);
    barrier.wait();
    return result;
  }
  template <class Number>
  Number team_sum(Number x) {
    return over_team(x, Number(), lanes, [](Number a, Number b) { return a + b; });
  }
  template <class Number>
  Number team_max(Number x) {
    return over_team(x, x, lanes, [](Number a, Number b) { return a > b ? a : b; });
  }
  int team_sum_before(int n) {
    return over_team(n, 0, lane, [](int a, int b) { return a + b; });
  }
};

// Runs work(block) on every thread of a block.
template <class Work>
void run_block(int teams, int lanes, Work work) {
  Meeting meeting(teams, lanes);
  std::vector<std::thread> threads;
  for (int i = 0; i < teams * lanes; ++i)
    threads.emplace_back([&, i] {
      Threaded block(meeting, i, teams, lanes);
      work(block);
    });
  for (std::thread& thread : threads) thread.join();
}

// Memory of a block, aligned as vectors need it, full of NaN.
inline float* aligned(std::vector<float>& memory, int size) {
  memory.assign(size + 64, __builtin_nanf(""));
  return (float*)(((uintptr_t)memory.data() + 63) / 64 * 64);
}

}  // namespace fastaug
