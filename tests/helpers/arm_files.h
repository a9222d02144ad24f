// Files of the drivers that run under qemu, and the functions of the library that they call.
#pragma once

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

// Arrays in a file, each at a multiple of 64 bytes.
class Reader {
 public:
  explicit Reader(const char* path) {
    FILE* file = std::fopen(path, "rb");
    std::fseek(file, 0, SEEK_END);
    const size_t size = std::ftell(file);
    std::rewind(file);
    next = static_cast<char*>(std::aligned_alloc(64, (size + 63) / 64 * 64));
    if (std::fread(next, 1, size, file) != size) std::abort();
    std::fclose(file);
  }

  template <class T>
  T* take(size_t count) {
    T* found = reinterpret_cast<T*>(next);
    next += (count * sizeof(T) + 63) / 64 * 64;
    return found;
  }

 private:
  char* next;
};

class Writer {
 public:
  explicit Writer(const char* path) : file(std::fopen(path, "wb")) {}
  ~Writer() { std::fclose(file); }
  void put(const void* data, size_t bytes) {
    if (std::fwrite(data, 1, bytes, file) != bytes) std::abort();
  }

 private:
  FILE* file;
};

inline void* function_of(const char* library, const char* name) {
  void* opened = dlopen(library, RTLD_NOW);
  void* found = opened ? dlsym(opened, name) : nullptr;
  if (!found) {
    std::fprintf(stderr, "%s\n", dlerror());
    std::exit(1);
  }
  return found;
}
