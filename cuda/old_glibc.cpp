// Linked into the prebuilt libraries only, so that they load with glibc 2.27 or newer (torch's wheels
// need 2.28) whatever glibc they are built with: from 2.34 on, the linker would bind these functions
// to a version that older ones lack. setup.py passes --wrap for each of OLD; libstdc++ calls them.
#include <pthread.h>

#ifdef __aarch64__
#define FIRST_VERSION "GLIBC_2.17"
#else
#define FIRST_VERSION "GLIBC_2.2.5"
#endif
#define HIDDEN extern "C" __attribute__((visibility("hidden")))
#define OLD(name, parameters, arguments)                     \
  extern "C" int old_##name parameters;                      \
  __asm__(".symver old_" #name "," #name "@" FIRST_VERSION); \
  HIDDEN int __wrap_##name parameters { return old_##name arguments; }

OLD(pthread_create,
    (pthread_t* thread, const pthread_attr_t* attributes, void* (*work)(void*), void* data),
    (thread, attributes, work, data))
OLD(pthread_join, (pthread_t thread, void** result), (thread, result))
OLD(pthread_detach, (pthread_t thread), (thread))
OLD(pthread_once, (pthread_once_t* control, void (*work)()), (control, work))
OLD(__pthread_key_create, (pthread_key_t* key, void (*destroy)(void*)), (key, destroy))

// glibc 2.32: whether the process has one thread. 0: it may have more, which is always right.
HIDDEN char __libc_single_threaded;
char __libc_single_threaded = 0;

// glibc 2.35: where an exception's handler is looked up. Nothing in these libraries throws one, and
// "not found" would end the process.
HIDDEN int _dl_find_object(void*, void*) { return -1; }
