// Views on a CPU: the block program with one thread per block, views divided among threads that run
// concurrently with the caller. A plain C interface, without torch.
//
// Throws nothing: an exception in a thread would end the process, and so would any one in a prebuilt
// library (old_glibc.cpp). A lack of memory is reported by fastaug_views_finish.
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <new>
#include <pthread.h>

#include "views.h"

// One struct, because a call from Python takes longer for each argument. native.py packs it.
struct Arguments {
  const fastaug::View* views;
  const fastaug::Layer* layers;  // form.layers for each view
  long long count;
  fastaug::Form form;
  int dtype;  // 0 fp32, 1 fp16, 2 bf16
  void* out;  // [count, size, size, 3]
  int threads;  // besides the caller's
};

namespace fastaug {
namespace {

// --- one view ---

constexpr size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

// Kept by each thread from view to view: fresh memory costs a page fault for every 4 KB.
class Arena {
 public:
  ~Arena() { free(memory); }

  // Null if there is no memory.
  byte* at_least(size_t bytes) {
    if (size < bytes) {
      free(memory);
      memory = static_cast<byte*>(aligned_alloc(64, aligned(bytes)));
      size = memory ? bytes : 0;
    }
    return memory;
  }

 private:
  byte* memory = nullptr;
  size_t size = 0;
};

// Returns false without memory.
template <class T>
bool make_view(const Arguments& a, long long number) {
  thread_local Arena arena;
  const View& view = a.views[number];
  // Rows of the view at a time: what fits into a quarter of the L1 cache.
  const int fit = 2048 / (3 * view.box_width + 64), strip = fit < 1 ? 1 : fit < 16 ? fit : 16;
  const Form& form = a.form;
  const Layer* layers = a.layers + number * form.layers;
  const Side x(view.box_width, form.size, form.filter), y(view.box_height, form.size, form.filter);
  const Room room(view, layers, form);
  const size_t scratch = aligned(4 * (size_t)Layout(form.size, LANES, x, y, strip).size);
  const size_t first = scratch + aligned(room.first), second = first + aligned(room.second);
  byte* memory = arena.at_least(second + room.box);
  if (!memory) return false;
  OneThread block;
  ViewProgram<OneThread, T>(block, view, layers, form, (float*)memory, memory + scratch,
                            memory + first, room.box ? memory + second : nullptr, strip)
      .run(static_cast<T*>(a.out) + 3LL * number * form.size * form.size);
  return true;
}

// --- the threads ---

struct Job {
  explicit Job(const Arguments& arguments)
      : arguments(arguments),
        chunk(1 + (1 << 17) / (3 * arguments.form.size * arguments.form.size)) {}
  const Arguments arguments;
  const int chunk;  // views that a thread takes at a time, about 50 us of work
  long long next = 0;
  int helpers = 0;  // threads that work on it, besides the caller's
  bool has_failed = false;
  Job* following = nullptr;  // in the queue
  bool is_taken() const { return next >= arguments.count; }
};

// Processes calls in order, each with at most the number of threads that it requested. Never
// destroyed: at the end of the process, its threads may still be waiting.
class Workers {
 public:
  static Workers& of_process() {
    alignas(Workers) static char memory[sizeof(Workers)];
    static std::once_flag once;
    std::call_once(once, [] {
      new (memory) Workers;
      // A forked child has none of its parent's threads.
      pthread_atfork(nullptr, nullptr, [] { new (memory) Workers; });
    });
    return *reinterpret_cast<Workers*>(memory);
  }

  void start(Job* job) {
    std::lock_guard<std::mutex> lock(mutex);
    Job** end = &jobs;
    while (*end) end = &(*end)->following;
    *end = job;
    // If a thread cannot be started, there are fewer: the caller works on every job.
    while (threads < job->arguments.threads && start_thread()) ++threads;
    changed.notify_all();
  }

  // The caller works on the job too, instead of waiting.
  // Returns false if there was no memory for a view.
  bool finish(Job* job) {
    std::unique_lock<std::mutex> lock(mutex);
    work_on(job, lock);
    changed.wait(lock, [&] { return !job->helpers; });
    Job** place = &jobs;
    while (*place != job) place = &(*place)->following;
    *place = job->following;
    return !job->has_failed;
  }

 private:
  std::mutex mutex;
  std::condition_variable changed;
  Job* jobs = nullptr;  // oldest first
  int threads = 0;

  bool start_thread() {
    pthread_t thread;
    const auto work = [](void* workers) -> void* {
      static_cast<Workers*>(workers)->serve();
      return nullptr;
    };
    return !pthread_create(&thread, nullptr, work, this) && !pthread_detach(thread);
  }

  void serve() {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      if (Job* job = next_job()) {
        ++job->helpers;
        work_on(job, lock);
        if (!--job->helpers) changed.notify_all();
      } else {
        changed.wait(lock);
      }
    }
  }

  Job* next_job() {
    for (Job* job = jobs; job; job = job->following)
      if (!job->is_taken() && job->helpers < job->arguments.threads) return job;
    return nullptr;
  }

  // Called and returns with the lock held.
  void work_on(Job* job, std::unique_lock<std::mutex>& lock) {
    const Arguments& a = job->arguments;
    while (!job->is_taken()) {
      const long long first = job->next, end = first + job->chunk;
      job->next = end;
      lock.unlock();
      bool done = true;
      for (long long i = first; done && i < end && i < a.count; ++i)
        done = a.dtype == 0   ? make_view<float>(a, i)
               : a.dtype == 1 ? make_view<f16>(a, i)
                              : make_view<bf16>(a, i);
      lock.lock();
      if (!done) {
        job->has_failed = true;
        job->next = a.count;  // nobody starts another part
      }
    }
  }
};

}  // namespace
}  // namespace fastaug

// Starts making views and returns the handle for fastaug_views_finish. The memory that the arguments
// point to must stay valid until then; the struct itself need not. Null without memory.
extern "C" void* fastaug_views_start(const Arguments* arguments) {
  void* memory = malloc(sizeof(fastaug::Job));
  if (!memory) return nullptr;
  auto* job = new (memory) fastaug::Job(*arguments);
  fastaug::Workers::of_process().start(job);
  return job;
}

// Returns 1, or 0 if there was no memory for a view.
extern "C" int fastaug_views_finish(void* started) {
  auto* job = static_cast<fastaug::Job*>(started);
  const bool is_complete = fastaug::Workers::of_process().finish(job);
  free(job);
  return is_complete;
}
