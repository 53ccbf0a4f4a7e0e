#include "base/openmp_team.h"

#include <unistd.h>

#include "base/affinity.h"
#include "base/imports.h"

namespace stow {
namespace {

constexpr const char* kTorch = "libtorch_cpu.so";
using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
using Count = int (*)();

const pid_t g_loaded_by = getpid();
thread_local bool t_in_scope = false;

template <typename Function>
Function imported(const char* name) {
  const auto imports = imports_of(kTorch, name);
  return imports.empty() ? nullptr : reinterpret_cast<Function>(*imports.front().slot);
}

struct OpenMp {
  Parallel parallel = imported<Parallel>("GOMP_parallel");
  Count most_threads = imported<Count>("omp_get_max_threads");
  Count is_in_parallel = imported<Count>("omp_in_parallel");
};

const OpenMp& openmp() {
  static const OpenMp kOpenMp;
  return kOpenMp;
}

}  // namespace

TorchTeamScope::TorchTeamScope() : before_(t_in_scope) { t_in_scope = true; }
TorchTeamScope::~TorchTeamScope() { t_in_scope = before_; }

bool run_on_team(int threads, void (*body)(void*), void* data) {
  if (!t_in_scope || getpid() != g_loaded_by || !thread_cores().empty()) return false;
  const OpenMp& omp = openmp();
  if (omp.parallel == nullptr || omp.most_threads == nullptr || omp.is_in_parallel == nullptr) {
    return false;
  }
  const int team = omp.most_threads();
  if ((threads != 0 && threads != team) || omp.is_in_parallel() != 0) return false;
  omp.parallel(body, data, static_cast<unsigned>(team), 0);
  return true;
}

}  // namespace stow
