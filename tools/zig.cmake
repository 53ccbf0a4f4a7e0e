# Builds for STOW_TARGET on any machine: Zig's compiler has the headers and the C library of every target with it.
# `make aarch64` builds the native tests for aarch64-linux-musl and runs them under qemu-user; `make wheels` builds
# the module for x86_64-linux-gnu.2.28 and aarch64-linux-gnu.2.28 (the oldest glibc that torch's wheels run on).
# STOW_ZIG is a Python that has the package ziglang. Both may come from the environment.
foreach(name STOW_ZIG STOW_TARGET)
  if(NOT DEFINED ${name})
    set(${name} "$ENV{${name}}")
  endif()
endforeach()
string(REGEX MATCH "^[^-]+" processor "${STOW_TARGET}")
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR ${processor})
set(CMAKE_CXX_COMPILER_TARGET ${STOW_TARGET})
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES STOW_ZIG STOW_TARGET)
set(CMAKE_CXX_COMPILER "${STOW_ZIG}" -m ziglang c++)
set(CMAKE_CXX_ARCHIVE_CREATE "${STOW_ZIG} -m ziglang ar qc <TARGET> <OBJECTS>")
set(CMAKE_CXX_ARCHIVE_FINISH "${STOW_ZIG} -m ziglang ranlib <TARGET>")
set(CMAKE_CXX_SCAN_FOR_MODULES OFF)
set(CMAKE_CXX_FLAGS_INIT "-include cstdio") # nanobind leaves it to the standard library's other headers
if(STOW_TARGET MATCHES "musl")
  set(CMAKE_EXE_LINKER_FLAGS_INIT "-static")
  find_program(QEMU NAMES qemu-${processor}-static qemu-${processor})
  if(NOT QEMU)
    message(FATAL_ERROR "no qemu-${processor} found: install it (Debian/Ubuntu: apt-get install qemu-user-static)")
  endif()
  set(CMAKE_CROSSCOMPILING_EMULATOR "${QEMU}")
endif()
