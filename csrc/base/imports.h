// The functions that a loaded shared library imports, and their replacement in its table.
#pragma once

#include <vector>

namespace stow {

// The place in memory from which the library calls a function of another.
struct Import {
  void** slot;
  bool read_only;
};

// Returns none where no loaded library has this file name, or where it does not import `function`.
std::vector<Import> imports_of(const char* library, const char* function);

// Returns false where the slot cannot be written. Other threads call either function meanwhile.
bool replace_import(const Import& import, void* function);

}  // namespace stow
