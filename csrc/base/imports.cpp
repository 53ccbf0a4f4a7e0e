#include "base/imports.h"

#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>

namespace stow {
namespace {

#if defined(__x86_64__)
constexpr std::uint32_t kJumpSlot = R_X86_64_JUMP_SLOT;
constexpr std::uint32_t kGlobalData = R_X86_64_GLOB_DAT;
#elif defined(__aarch64__)
constexpr std::uint32_t kJumpSlot = R_AARCH64_JUMP_SLOT;
constexpr std::uint32_t kGlobalData = R_AARCH64_GLOB_DAT;
#else
constexpr std::uint32_t kJumpSlot = UINT32_MAX;
constexpr std::uint32_t kGlobalData = UINT32_MAX;
#endif

// What the dynamic section of a library says of its relocations.
struct Dynamic {
  const Elf64_Sym* symbols = nullptr;
  const char* strings = nullptr;
  const Elf64_Rela* of_calls = nullptr;
  std::size_t of_calls_bytes = 0;
  const Elf64_Rela* others = nullptr;
  std::size_t others_bytes = 0;
};

// glibc has made these absolute when it loaded the library.
template <typename T>
const T* at(const Elf64_Dyn& entry) {
  return reinterpret_cast<const T*>(entry.d_un.d_ptr);
}

Dynamic read_dynamic(const Elf64_Dyn* entry) {
  Dynamic dynamic;
  for (; entry->d_tag != DT_NULL; ++entry) {
    switch (entry->d_tag) {
      case DT_SYMTAB:
        dynamic.symbols = at<Elf64_Sym>(*entry);
        break;
      case DT_STRTAB:
        dynamic.strings = at<char>(*entry);
        break;
      case DT_JMPREL:
        dynamic.of_calls = at<Elf64_Rela>(*entry);
        break;
      case DT_PLTRELSZ:
        dynamic.of_calls_bytes = entry->d_un.d_val;
        break;
      case DT_RELA:
        dynamic.others = at<Elf64_Rela>(*entry);
        break;
      case DT_RELASZ:
        dynamic.others_bytes = entry->d_un.d_val;
        break;
      default:
        break;
    }
  }
  return dynamic;
}

std::uintptr_t page_size() { return static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE)); }

struct Search {
  const char* library;
  const char* function;
  std::vector<Import> found;
};

void search(const dl_phdr_info& info, Search& wanted) {
  const Elf64_Dyn* section = nullptr;
  Elf64_Addr read_only_begin = 0;
  Elf64_Addr read_only_end = 0;
  for (int k = 0; k < info.dlpi_phnum; ++k) {
    const Elf64_Phdr& header = info.dlpi_phdr[k];
    const Elf64_Addr begin = info.dlpi_addr + header.p_vaddr;
    if (header.p_type == PT_DYNAMIC) section = reinterpret_cast<const Elf64_Dyn*>(begin);
    if (header.p_type == PT_GNU_RELRO) {
      read_only_begin = begin;  // whole pages are: what begins on the last page stays writable
      read_only_end = (begin + header.p_memsz) / page_size() * page_size();
    }
  }
  if (section == nullptr) return;
  const Dynamic dynamic = read_dynamic(section);
  if (dynamic.symbols == nullptr || dynamic.strings == nullptr) return;

  const auto look_through = [&](const Elf64_Rela* relocations, std::size_t bytes) {
    for (std::size_t k = 0; k < bytes / sizeof *relocations; ++k) {
      const Elf64_Rela& each = relocations[k];
      const std::uint32_t type = ELF64_R_TYPE(each.r_info);
      if (type != kJumpSlot && type != kGlobalData) continue;
      const Elf64_Sym& symbol = dynamic.symbols[ELF64_R_SYM(each.r_info)];
      if (std::strcmp(dynamic.strings + symbol.st_name, wanted.function) != 0) continue;
      const Elf64_Addr slot = info.dlpi_addr + each.r_offset;
      const bool read_only = read_only_begin <= slot && slot < read_only_end;
      wanted.found.push_back({reinterpret_cast<void**>(slot), read_only});
    }
  };
  look_through(dynamic.of_calls, dynamic.of_calls_bytes);
  look_through(dynamic.others, dynamic.others_bytes);
}

int search_one(dl_phdr_info* info, std::size_t, void* data) {
  auto& wanted = *static_cast<Search*>(data);
  const char* slash = std::strrchr(info->dlpi_name, '/');
  const char* name = slash == nullptr ? info->dlpi_name : slash + 1;
  if (std::strcmp(name, wanted.library) != 0) return 0;
  search(*info, wanted);
  return 1;  // ends the walk
}

}  // namespace

std::vector<Import> imports_of(const char* library, const char* function) {
  Search wanted{library, function, {}};
  dl_iterate_phdr(search_one, &wanted);
  return wanted.found;
}

bool replace_import(const Import& import, void* function) {
  const std::uintptr_t page = page_size();
  void* begin =
      reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(import.slot) / page * page);
  if (import.read_only && mprotect(begin, page, PROT_READ | PROT_WRITE) != 0) return false;
  std::atomic_ref<void*>(*import.slot).store(function, std::memory_order_release);
  if (import.read_only) mprotect(begin, page, PROT_READ);
  return true;
}

}  // namespace stow
