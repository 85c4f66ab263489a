// Counts how often threads take the GIL, and which loaded object requested it.
//
// A loaded object calls another object's function through an address that the dynamic linker has
// written into the caller. This library replaces the addresses of the functions that give the GIL
// by addresses of wrappers. It leaves out the interpreter's object: the calls inside it depend on
// how it was linked, and would count twice.
//
// Needs neither Python's headers nor torch: it looks Python's functions up by name.

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <tuple>

#if defined(__x86_64__)
constexpr uint32_t kJumpSlot = R_X86_64_JUMP_SLOT;
constexpr uint32_t kGlobalData = R_X86_64_GLOB_DAT;
constexpr uint32_t kPointer = R_X86_64_64;
#elif defined(__aarch64__)
constexpr uint32_t kJumpSlot = R_AARCH64_JUMP_SLOT;
constexpr uint32_t kGlobalData = R_AARCH64_GLOB_DAT;
constexpr uint32_t kPointer = R_AARCH64_ABS64;
#else
#error "gil_calls.cpp: the machine must be x86_64 or aarch64"
#endif

namespace {

// ---- the counts ---------------------------------------------------------------------------------

// Function, whether the thread had the GIL already, thread, return address of the call.
using Key = std::tuple<int, bool, int64_t, uintptr_t>;

std::mutex counts_mutex;  // for Python without a GIL; otherwise callers hold the GIL
// Never destroyed: other threads may still take the GIL while the process ends.
std::map<Key, int64_t>& counts = *new std::map<Key, int64_t>;
std::atomic<int> users{0};

// Called after the thread got the GIL, so that a request that never ends is not counted.
void count(int function, bool already_held, void* caller) {
  if (users.load(std::memory_order_relaxed) == 0) {
    return;  // a copy of a wrapper's address was used after the last user left
  }
  const int error = errno;  // the wrapped functions preserve it
  {
    std::lock_guard<std::mutex> lock(counts_mutex);
    // Asks the system each time: a stored number would be wrong after a fork.
    const int64_t thread = syscall(SYS_gettid);
    ++counts[{function, already_held, thread, reinterpret_cast<uintptr_t>(caller)}];
  }
  errno = error;
}

// ---- the wrappers -------------------------------------------------------------------------------

enum Function { kEnsure, kAcquireThread, kRestoreThread, kAcquireLock, kSwap, kFunctions };

// Null for a function that this Python does not have, or that gives no GIL in this version.
void* real[kFunctions];

int ensure() {
  void* caller = __builtin_return_address(0);
  const int state = reinterpret_cast<int (*)()>(real[kEnsure])();
  // PyGILState_LOCKED means that this thread had the GIL before. PyGILState_Ensure relies on the
  // same; PyGILState_Check is always true once there are subinterpreters.
  constexpr int kLocked = 0;
  count(kEnsure, state == kLocked, caller);
  return state;
}

template <Function kFunction, typename... Arguments>
void acquire(Arguments... arguments) {
  void* caller = __builtin_return_address(0);
  reinterpret_cast<void (*)(Arguments...)>(real[kFunction])(arguments...);
  count(kFunction, false, caller);
}

void* swap(void* thread_state) {
  void* caller = __builtin_return_address(0);
  void* before = reinterpret_cast<void* (*)(void*)>(real[kSwap])(thread_state);
  if (thread_state != nullptr) {  // a swap to null releases the GIL
    count(kSwap, false, caller);
  }
  return before;
}

struct Wrapped {
  const char* name;
  void* wrapper;
};

const Wrapped kWrapped[kFunctions] = {
    {"PyGILState_Ensure", reinterpret_cast<void*>(ensure)},
    {"PyEval_AcquireThread", reinterpret_cast<void*>(acquire<kAcquireThread, void*>)},
    {"PyEval_RestoreThread", reinterpret_cast<void*>(acquire<kRestoreThread, void*>)},
    {"PyEval_AcquireLock", reinterpret_cast<void*>(acquire<kAcquireLock>)},  // gone in Python 3.13
    {"PyThreadState_Swap", reinterpret_cast<void*>(swap)},
};

bool find_real_functions() {
  for (int i = 0; i < kFunctions; ++i) {
    real[i] = dlsym(RTLD_DEFAULT, kWrapped[i].name);
  }
  // Up to Python 3.11 the caller of PyThreadState_Swap holds the GIL before and after.
  const auto* version = static_cast<const unsigned long*>(dlsym(RTLD_DEFAULT, "Py_Version"));
  if (version == nullptr || *version < 0x030C0000) {
    real[kSwap] = nullptr;
  }
  return real[kEnsure] != nullptr && real[kRestoreThread] != nullptr;
}

// ---- the loaded objects -------------------------------------------------------------------------

// A loaded object's tables with addresses of other objects' functions.
struct Object {
  explicit Object(const dl_phdr_info& info) : info(info) {
    const ElfW(Dyn)* entry = nullptr;
    const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    for (int i = 0; i < info.dlpi_phnum; ++i) {
      const ElfW(Phdr) & header = info.dlpi_phdr[i];
      const uintptr_t begin = info.dlpi_addr + header.p_vaddr;
      if (header.p_type == PT_DYNAMIC) {
        entry = reinterpret_cast<const ElfW(Dyn)*>(begin);
      } else if (header.p_type == PT_GNU_RELRO) {
        // Whole pages, since the dynamic linker protects whole pages.
        relro_begin = begin & ~(page - 1);
        relro_end = (begin + header.p_memsz) & ~(page - 1);
      }
    }
    for (; entry != nullptr && entry->d_tag != DT_NULL; ++entry) {
      switch (entry->d_tag) {
        case DT_SYMTAB:
          symbols = at<ElfW(Sym)>(entry->d_un.d_ptr);
          break;
        case DT_STRTAB:
          names = at<char>(entry->d_un.d_ptr);
          break;
        case DT_RELA:
          tables[0] = at<ElfW(Rela)>(entry->d_un.d_ptr);
          break;
        case DT_RELASZ:
          sizes[0] = entry->d_un.d_val / sizeof(ElfW(Rela));
          break;
        case DT_JMPREL:  // of the same kind as DT_RELA on these machines
          tables[1] = at<ElfW(Rela)>(entry->d_un.d_ptr);
          break;
        case DT_PLTRELSZ:
          sizes[1] = entry->d_un.d_val / sizeof(ElfW(Rela));
          break;
        default:
          break;
      }
    }
  }

  // glibc makes these addresses absolute when it loads the object; other C libraries do not.
  template <typename T>
  const T* at(uintptr_t address) const {
    return reinterpret_cast<const T*>(address < info.dlpi_addr ? info.dlpi_addr + address
                                                               : address);
  }

  bool contains(const void* pointer) const {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    for (int i = 0; i < info.dlpi_phnum; ++i) {
      const ElfW(Phdr) & header = info.dlpi_phdr[i];
      const uintptr_t begin = info.dlpi_addr + header.p_vaddr;
      if (header.p_type == PT_LOAD && address >= begin && address < begin + header.p_memsz) {
        return true;
      }
    }
    return false;
  }

  // Calls `visit(function, type, slot)` for each address of a function in kWrapped.
  template <typename Visit>
  void for_each_slot(const Visit& visit) const {
    if (symbols == nullptr || names == nullptr) {
      return;
    }
    for (int table = 0; table < 2; ++table) {
      for (size_t i = 0; tables[table] != nullptr && i < sizes[table]; ++i) {
        const ElfW(Rela) & relocation = tables[table][i];
        const auto type = static_cast<uint32_t>(ELF64_R_TYPE(relocation.r_info));
        if (type != kJumpSlot && type != kGlobalData && type != kPointer) {
          continue;
        }
        const ElfW(Sym) & symbol = symbols[ELF64_R_SYM(relocation.r_info)];
        const char* name = names + symbol.st_name;
        if (symbol.st_shndx != SHN_UNDEF || name[0] != 'P' || name[1] != 'y') {
          continue;
        }
        for (int function = 0; function < kFunctions; ++function) {
          if (real[function] != nullptr && std::strcmp(name, kWrapped[function].name) == 0) {
            visit(function, type, reinterpret_cast<void**>(info.dlpi_addr + relocation.r_offset));
          }
        }
      }
    }
  }

  // Other threads may call through the slot at any time. Returns false and sets errno on failure.
  bool write(void** slot, void* value) const {
    const auto address = reinterpret_cast<uintptr_t>(slot);
    const bool read_only = address >= relro_begin && address < relro_end;
    const auto size = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    void* page = reinterpret_cast<void*>(address & ~(size - 1));
    if (read_only && mprotect(page, size, PROT_READ | PROT_WRITE) != 0) {
      return false;
    }
    __atomic_store_n(slot, value, __ATOMIC_RELEASE);
    return !read_only || mprotect(page, size, PROT_READ) == 0;
  }

  const dl_phdr_info& info;
  const ElfW(Sym) * symbols = nullptr;
  const char* names = nullptr;
  const ElfW(Rela) * tables[2] = {nullptr, nullptr};
  size_t sizes[2] = {0, 0};
  uintptr_t relro_begin = 0, relro_end = 0;
};

std::string named(const Object& object, int function, const std::string& problem) {
  const char* path = object.info.dlpi_name;
  return std::string("gil_calls: ") + kWrapped[function].name + " in '" +
         (path != nullptr && *path != '\0' ? path : "the program") + "' " + problem;
}

// Points the slots of one object to the wrappers. Writes an error into `data`.
int install(dl_phdr_info* info, size_t /*size*/, void* data) {
  auto& error = *static_cast<std::string*>(data);
  const Object object(*info);
  if (object.contains(real[kEnsure])) {
    return 0;  // skips the interpreter
  }
  object.for_each_slot([&](int function, uint32_t type, void** slot) {
    void* value = __atomic_load_n(slot, __ATOMIC_ACQUIRE);
    if (value == kWrapped[function].wrapper) {
      return;
    }
    // Before the first call, a slot may point to the object's own code, which looks the function
    // up.
    const bool to_be_looked_up = type == kJumpSlot && object.contains(value);
    if (value == real[function] || to_be_looked_up) {
      if (!object.write(slot, kWrapped[function].wrapper)) {
        error = named(object, function, std::string("can't be replaced: ") + std::strerror(errno));
      }
    } else if (type != kPointer) {  // a variable may have another value by now
      error = named(object, function, "is not the interpreter's: its calls can't be counted");
    }
  });
  return 0;
}

// Points slots to the real functions. Keeps no list of slots, since an object may be gone by now.
int uninstall(dl_phdr_info* info, size_t /*size*/, void* data) {
  auto& error = *static_cast<std::string*>(data);
  const Object object(*info);
  object.for_each_slot([&](int function, uint32_t /*type*/, void** slot) {
    if (__atomic_load_n(slot, __ATOMIC_ACQUIRE) == kWrapped[function].wrapper &&
        !object.write(slot, real[function])) {
      error = named(object, function, std::string("can't be put back: ") + std::strerror(errno));
    }
  });
  return 0;
}

int count_installed(dl_phdr_info* info, size_t /*size*/, void* data) {
  auto& installed = *static_cast<int64_t*>(data);
  Object(*info).for_each_slot([&](int function, uint32_t /*type*/, void** slot) {
    installed += __atomic_load_n(slot, __ATOMIC_ACQUIRE) == kWrapped[function].wrapper;
  });
  return 0;
}

std::string last_error;

const char* message_or_null(const std::string& error) {
  last_error = error;
  return last_error.empty() ? nullptr : last_error.c_str();
}

}  // namespace

// ---- the interface for Python, always called with the GIL held ---------------------------------

extern "C" {

// Adds a user; also handles objects that were loaded since. Returns an error or null.
const char* gil_calls_start() {
  std::string error;
  if (!find_real_functions()) {
    return message_or_null("gil_calls: this process has no PyGILState_Ensure to be found by name");
  }
  dl_iterate_phdr(install, &error);
  if (error.empty()) {
    users.fetch_add(1);
  } else if (users.load() == 0) {
    std::string ignored;
    dl_iterate_phdr(uninstall, &ignored);
  }
  return message_or_null(error);
}

// Removes a user; the last one restores everything. Returns an error or null.
const char* gil_calls_stop() {
  std::string error;
  if (users.fetch_sub(1) == 1) {
    dl_iterate_phdr(uninstall, &error);
    std::lock_guard<std::mutex> lock(counts_mutex);
    counts.clear();
  }
  return message_or_null(error);
}

// The number of addresses that point to wrappers now: 0 without users.
int64_t gil_calls_installed() {
  int64_t installed = 0;
  dl_iterate_phdr(count_installed, &installed);
  return installed;
}

// The number of objects that this process has loaded so far.
uint64_t gil_calls_objects_loaded() {
  uint64_t loaded = 0;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        *static_cast<uint64_t*>(data) = info->dlpi_adds;
        return 1;
      },
      &loaded);
  return loaded;
}

struct GilCallsRow {
  const char* function;
  const char* library;  // the path of the calling object; null if it is gone
  int64_t thread;       // the system's number
  int64_t already_held;
  int64_t count;
};

// Writes up to `capacity` rows and returns the number of all rows.
int64_t gil_calls_read(GilCallsRow* rows, int64_t capacity) {
  std::lock_guard<std::mutex> lock(counts_mutex);
  int64_t number = 0;
  for (const auto& [key, calls] : counts) {
    if (number < capacity) {
      const auto& [function, already_held, thread, caller] = key;
      Dl_info found = {};
      // One byte back: the return address of a call at a function's end belongs to the next
      // function.
      const bool known = dladdr(reinterpret_cast<void*>(caller - 1), &found) != 0;
      rows[number] = {kWrapped[function].name, known ? found.dli_fname : nullptr, thread,
                      already_held, calls};
    }
    ++number;
  }
  return number;
}

}  // extern "C"
