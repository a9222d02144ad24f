/* What chaos.py loads into a training (LD_PRELOAD): a clock that it can set, and file operations
 * that it can count and kill the process at. chaos_shim.py has the same layout of `struct control`.
 *
 * The clock: CLOCK_REALTIME, as programs read it and wait for it; the machine's own is not touched.
 * A file operation: one that changes the run folder, named by what it does, to which file, and, for
 * those on an open file, the how many-th it is: "write step.tmp 3".
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

struct control {
    volatile int64_t offset;    /* of the clock, in seconds */
    volatile int64_t is_logged; /* whether operations go to the file CONTROL.log */
    char folder[1024];          /* the run folder, absolute */
    char target[128];           /* the operation to kill the process before; "" for none */
    volatile int64_t killed;    /* processes that were */
};

static struct control *control;
static int log_file = -1;

/* The function that this library hides. */
#define REAL(name)                                                        \
    ({                                                                    \
        static __typeof__(&name) found;                                   \
        if (!found) found = (__typeof__(&name))dlsym(RTLD_NEXT, #name);   \
        found;                                                            \
    })

__attribute__((constructor)) static void attach(void) {
    const char *path = getenv("FASTAUG_CHAOS_CONTROL");
    if (!path) return;
    int file = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC, 0);
    if (file < 0) return;
    void *memory = mmap(0, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    syscall(SYS_close, file);
    if (memory == MAP_FAILED) return;
    char name[PATH_MAX];
    snprintf(name, sizeof name, "%s.log", path);
    log_file = (int)syscall(SYS_openat, AT_FDCWD, name, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    control = memory;
}

/* --- the clock --- */

static int64_t offset(void) {
    return control ? control->offset : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int code = REAL(clock_gettime)(clock, now);
    if (!code && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += offset();
    return code;
}

int gettimeofday(struct timeval *now, void *zone) {
    int code = REAL(gettimeofday)(now, zone);
    if (!code) now->tv_sec += offset();
    return code;
}

time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}

/* A wait until a time of day: in slices, so that it ends when the clock passes that time. */

enum { SLICE = 200 * 1000 * 1000, SECOND = 1000 * 1000 * 1000 };

static int is_time_of_day(const struct timespec *deadline) {
    return deadline->tv_sec > 300 * 1000 * 1000; /* the monotonic clock counts from the boot */
}

static int has_passed(const struct timespec *deadline) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return now.tv_sec > deadline->tv_sec || (now.tv_sec == deadline->tv_sec && now.tv_nsec >= deadline->tv_nsec);
}

static struct timespec next_slice(const struct timespec *deadline) {
    struct timespec end;
    REAL(clock_gettime)(CLOCK_REALTIME, &end);
    end.tv_nsec += SLICE;
    if (end.tv_nsec >= SECOND) end.tv_sec++, end.tv_nsec -= SECOND;
    struct timespec own = *deadline;
    own.tv_sec -= offset();
    int is_sooner = own.tv_sec < end.tv_sec || (own.tv_sec == end.tv_sec && own.tv_nsec < end.tv_nsec);
    return is_sooner ? own : end;
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *deadline) {
    static __typeof__(&pthread_cond_timedwait) wait;
    /* The default version of the symbol: dlsym would find the one of 1998. */
    if (!wait) wait = (__typeof__(wait))dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!wait) wait = REAL(pthread_cond_timedwait);
    if (!control || !is_time_of_day(deadline)) return wait(condition, mutex, deadline);
    struct timespec slice = next_slice(deadline);
    int code = wait(condition, mutex, &slice);
    return code == ETIMEDOUT && !has_passed(deadline) ? 0 : code; /* 0: a spurious wakeup */
}

int sem_timedwait(sem_t *semaphore, const struct timespec *deadline) {
    if (!control || !is_time_of_day(deadline)) return REAL(sem_timedwait)(semaphore, deadline);
    for (;;) {
        struct timespec slice = next_slice(deadline);
        int code = REAL(sem_timedwait)(semaphore, &slice);
        if (!code || errno != ETIMEDOUT || has_passed(deadline)) return code;
    }
}

/* --- file operations --- */

enum { FILES = 4096 };
static struct {
    char role[48];
    int operations;
} open_files[FILES];

static const char *const ROLES[] = {"step-",       "last.pt",      "best.pt",   "best.safetensors", "metrics.jsonl",
                                    "config.json", "summary.json", "views.png", "bad-images.txt",   "checkpoints"};

/* What a path below the run folder is: "step.tmp", "last.pt"; "" for others. */
static void find_role(int folder, const char *path, char *role, size_t size) {
    char whole[PATH_MAX * 2] = "";
    role[0] = 0;
    if (!control || !control->folder[0] || !path) return;
    if (path[0] != '/' && folder != AT_FDCWD) {
        char link[64];
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t length = readlink(link, whole, PATH_MAX - 2);
        if (length < 0) return;
        whole[length] = '/';
        whole[length + 1] = 0;
    }
    strncat(whole, path, PATH_MAX - 1);
    size_t length = strlen(control->folder);
    if (strncmp(whole, control->folder, length)) return;
    if (!whole[length]) snprintf(role, size, "run folder");
    if (whole[length] != '/') return;
    const char *name = strrchr(whole, '/') + 1;
    for (size_t i = 0; i < sizeof ROLES / sizeof *ROLES; i++)
        if (strstr(name, ROLES[i])) {
            const char *end = strstr(name, ".tmp") ? ".tmp" : "";
            snprintf(role, size, "%s%s", i ? ROLES[i] : "step", end);
            return;
        }
}

static int is_target(const char *what) {
    return control->target[0] && !strcmp(what, control->target);
}

static void die(void) {
    __atomic_add_fetch(&control->killed, 1, __ATOMIC_SEQ_CST);
    control->target[0] = 0;
    syscall(SYS_kill, getpid(), SIGKILL);
    for (;;) pause();
}

static void reach(const char *what) {
    if (control->is_logged && log_file >= 0) {
        char line[160];
        int length = snprintf(line, sizeof line, "%s\n", what);
        syscall(SYS_write, log_file, line, (size_t)length);
    }
    if (is_target(what)) die();
}

static void on_path(const char *operation, int folder, const char *path) {
    char role[48], what[128];
    int error = errno;
    find_role(folder, path, role, sizeof role);
    if (role[0]) {
        snprintf(what, sizeof what, "%s %s", operation, role);
        reach(what);
    }
    errno = error;
}

static void name_on_file(const char *operation, int file, char *what, size_t size) {
    what[0] = 0;
    if (control && file >= 0 && file < FILES && open_files[file].role[0])
        snprintf(what, size, "%s %s %d", operation, open_files[file].role, ++open_files[file].operations);
}

static void opened(int file, int folder, const char *path) {
    if (file < 0 || file >= FILES) return;
    int error = errno;
    open_files[file].role[0] = 0;
    open_files[file].operations = 0;
    find_role(folder, path, open_files[file].role, sizeof open_files[file].role);
    errno = error;
}

static int is_writing(int flags) {
    return (flags & O_ACCMODE) != O_RDONLY;
}

#define MODE(flags)                          \
    mode_t mode = 0;                         \
    if (flags & (O_CREAT | O_TMPFILE)) {     \
        va_list rest;                        \
        va_start(rest, flags);               \
        mode = va_arg(rest, mode_t);         \
        va_end(rest);                        \
    }

static int open_any(int folder, const char *path, int flags, mode_t mode) {
    if (control && is_writing(flags)) on_path("open", folder, path);
    int file = (int)syscall(SYS_openat, folder, path, flags, mode);
    if (control) opened(file, folder, path);
    return file;
}

int open(const char *path, int flags, ...) {
    MODE(flags)
    return open_any(AT_FDCWD, path, flags, mode);
}
int open64(const char *path, int flags, ...) {
    MODE(flags)
    return open_any(AT_FDCWD, path, flags | O_LARGEFILE, mode);
}
int openat(int folder, const char *path, int flags, ...) {
    MODE(flags)
    return open_any(folder, path, flags, mode);
}
int openat64(int folder, const char *path, int flags, ...) {
    MODE(flags)
    return open_any(folder, path, flags | O_LARGEFILE, mode);
}

int close(int file) {
    if (file >= 0 && file < FILES) open_files[file].role[0] = 0;
    return (int)syscall(SYS_close, file);
}

ssize_t write(int file, const void *content, size_t size) {
    char what[128];
    name_on_file("write", file, what, sizeof what);
    if (what[0]) {
        reach(what);
        char half[160];
        snprintf(half, sizeof half, "half of %s", what);
        if (is_target(half)) {
            syscall(SYS_write, file, content, size / 2);
            die();
        }
    }
    return syscall(SYS_write, file, content, size);
}

int fsync(int file) {
    char what[128];
    name_on_file("fsync", file, what, sizeof what);
    if (what[0]) reach(what);
    return (int)syscall(SYS_fsync, file);
}
int ftruncate(int file, off_t size) {
    char what[128];
    name_on_file("ftruncate", file, what, sizeof what);
    if (what[0]) reach(what);
    return (int)syscall(SYS_ftruncate, file, size);
}
int ftruncate64(int file, off64_t size) {
    return ftruncate(file, size);
}

int rename(const char *from, const char *to) {
    on_path("rename to", AT_FDCWD, to);
    return (int)syscall(SYS_renameat, AT_FDCWD, from, AT_FDCWD, to);
}
int renameat(int from_folder, const char *from, int to_folder, const char *to) {
    on_path("rename to", to_folder, to);
    return (int)syscall(SYS_renameat, from_folder, from, to_folder, to);
}
int link(const char *from, const char *to) {
    on_path("link", AT_FDCWD, to);
    return (int)syscall(SYS_linkat, AT_FDCWD, from, AT_FDCWD, to, 0);
}
int linkat(int from_folder, const char *from, int to_folder, const char *to, int flags) {
    on_path("link", to_folder, to);
    return (int)syscall(SYS_linkat, from_folder, from, to_folder, to, flags);
}
int unlink(const char *path) {
    on_path("unlink", AT_FDCWD, path);
    return (int)syscall(SYS_unlinkat, AT_FDCWD, path, 0);
}
int unlinkat(int folder, const char *path, int flags) {
    on_path("unlink", folder, path);
    return (int)syscall(SYS_unlinkat, folder, path, flags);
}
int mkdir(const char *path, mode_t mode) {
    on_path("mkdir", AT_FDCWD, path);
    return (int)syscall(SYS_mkdirat, AT_FDCWD, path, mode);
}
int mkdirat(int folder, const char *path, mode_t mode) {
    on_path("mkdir", folder, path);
    return (int)syscall(SYS_mkdirat, folder, path, mode);
}
