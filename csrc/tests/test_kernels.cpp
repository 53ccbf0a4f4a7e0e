// Every instruction set against the scalar kernels, bit by bit; the norm's tree against a naive
// one; the pool.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <limits>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "base/pool.h"
#include "kernels/kernels.h"
#include "tests/check.h"

#ifdef STOW_X86
#include <immintrin.h>
#endif

using namespace stow;

namespace {

constexpr DType kDTypes[] = {DType::f32, DType::bf16, DType::f16};

struct Bits {
  std::mt19937_64 random{20240229};

  // Any bits at all, every eighth value one of the special ones.
  template <class T>
  void fill(std::vector<T>& out, const std::vector<T>& special) {
    for (T& x : out) {
      const std::uint64_t r = random();
      x = (r & 7) == 0 ? special[(r >> 8) % special.size()] : static_cast<T>(r >> 16);
    }
  }
};

const std::vector<std::uint32_t> kSpecial32 = {
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007fffff, 0x00800000, 0x3f800000, 0xbf800000,
    0x7f7fffff, 0x7f800000, 0xff800000, 0x7fc00000, 0x7f800001, 0xffc00001, 0x3f7fffff, 0x3f808000,
    0x3f818000, 0x33000000, 0x33000001, 0x387fe000, 0x477fefff, 0x477ff000, 0x7f7f8000, 0x00008000};
const std::vector<std::uint16_t> kSpecial16 = {0x0000, 0x8000, 0x0001, 0x8001, 0x007f, 0x0080,
                                               0x03ff, 0x0400, 0x3c00, 0x3f80, 0x7bff, 0x7c00,
                                               0xfc00, 0x7c01, 0x7e00, 0x7f80, 0xff80, 0x7f81};

void set(AdamArgs& args, Stream stream, void* data) {
  args.states[static_cast<int>(stream)] = data;
}

// One update's arrays as raw bits, with room before them to shift their alignment.
struct Problem {
  std::vector<std::uint32_t> words[7];  // param, grad, master, m, v, vmax, ema: the last are fp32
  std::vector<std::uint16_t> halves[2];
  DType param_dtype, grad_dtype;
  bool amsgrad;

  Problem(std::int64_t n, DType p, DType g, bool ams, Bits& bits)
      : param_dtype(p), grad_dtype(g), amsgrad(ams) {
    for (auto& array : words) array.resize(static_cast<std::size_t>(n));
    for (auto& array : halves) array.resize(static_cast<std::size_t>(n));
    for (auto& array : words) bits.fill(array, kSpecial32);
    for (auto& array : halves) bits.fill(array, kSpecial16);
  }

  void* array(int which, DType dtype, std::int64_t offset) {
    if (dtype == DType::f32) return words[which].data() + offset;
    return halves[which].data() + offset;
  }
  float* state(int which, std::int64_t offset) {
    return reinterpret_cast<float*>(words[which].data() + offset);
  }

  AdamArgs args(std::int64_t offset, std::int64_t n, const AdamHyper& hyper, bool seed) {
    AdamArgs args{};
    args.param = array(0, param_dtype, offset);
    args.grad = array(1, grad_dtype, offset);
    set(args, Stream::m, state(3, offset));
    set(args, Stream::v, state(4, offset));
    if (amsgrad) set(args, Stream::vmax, state(5, offset));
    set(args, Stream::ema, state(6, offset));
    args.ema = true;
    if (param_dtype != DType::f32) set(args, Stream::master, state(2, offset));
    args.n = n;
    args.param_dtype = param_dtype;
    args.grad_dtype = grad_dtype;
    args.amsgrad = amsgrad;
    args.seed_master = seed;
    args.hyper = hyper;
    return args;
  }
};

bool same(std::uint32_t a, std::uint32_t b) {
  const float x = std::bit_cast<float>(a);
  const float y = std::bit_cast<float>(b);
  return a == b || (std::isnan(x) && std::isnan(y));
}

bool half_is_nan(std::uint16_t bits, DType dtype) {
  return (bits & 0x7fff) > (dtype == DType::bf16 ? 0x7f80 : 0x7c00);
}

bool same(const Problem& a, const Problem& b) {
  for (int k = 0; k < 7; ++k) {
    for (std::size_t i = 0; i < a.words[k].size(); ++i) {
      if (!same(a.words[k][i], b.words[k][i])) return false;
    }
  }
  for (std::size_t i = 0; i < a.halves[0].size(); ++i) {
    const std::uint16_t x = a.halves[0][i];
    const std::uint16_t y = b.halves[0][i];
    if (x != y && !(half_is_nan(x, a.param_dtype) && half_is_nan(y, a.param_dtype))) return false;
  }
  return a.halves[1] == b.halves[1];
}

AdamHyper hyper_of(int variant, bool l2) {
  AdamHyper h{0.1f, 0.999f, 0.001f, 1.0f, 0.0f, 0.01f, 31.6f, 1e-8f, 1.0f};
  if (l2) h.l2 = 0.01f;
  h.ema_weight = variant == 0 ? 1e-4f : 1.0f;
  if (variant == 1) h = {0.9f, 0.5f, 0.5f, 0.99f, h.l2, 1e-3f, 1.41f, 0.0f, -0.37f, 0.7f};
  if (variant == 2) h = {1.0f, 0.0f, 1.0f, 1.0f, h.l2, 1e30f, 1.0f, 1e-30f, 1e-20f};
  return h;
}

template <class Body>
void for_every_case(Body body) {
  for (DType p : kDTypes) {
    for (DType g : kDTypes) {
      for (int mode = 0; mode < 4; ++mode) body(p, g, (mode & 1) != 0, (mode & 2) != 0);
    }
  }
}

void test_isas_agree() {
  Bits bits;
  for_every_case([&](DType p, DType g, bool amsgrad, bool l2) {
    for (std::int64_t n : {0, 1, 7, 8, 15, 16, 17, 63, 64, 65, 127, 333, 1025, 5000}) {
      for (std::int64_t offset : {0, 1, 5}) {
        const Problem start(n + offset, p, g, amsgrad, bits);
        const AdamHyper hyper = hyper_of(static_cast<int>(n % 3), l2);
        const bool seed = p != DType::f32 && n % 2 == 1;
        Problem want = start;
        adam_update(want.args(offset, n, hyper, seed), Isa::scalar);
        for (Isa isa : {Isa::avx2, Isa::avx512, Isa::neon}) {
          if (!isa_supported(isa)) continue;
          Problem got = start;
          adam_update(got.args(offset, n, hyper, seed), isa);
          CHECK(same(want, got));
        }
      }
    }
  });
}

void test_every_split_agrees() {
  constexpr std::int64_t n = 200;
  Bits bits;
  for_every_case([&](DType p, DType g, bool amsgrad, bool l2) {
    const Problem start(n, p, g, amsgrad, bits);
    const AdamHyper hyper = hyper_of(0, l2);
    for (Isa isa : kIsas) {
      if (!isa_supported(isa)) continue;
      Problem whole = start;
      adam_update(whole.args(0, n, hyper, false), isa);
      for (std::int64_t cut = 0; cut <= n; ++cut) {
        Problem parts = start;
        adam_update(parts.args(0, cut, hyper, false), isa);
        adam_update(parts.args(cut, n - cut, hyper, false), isa);
        CHECK(same(whole, parts));
      }
    }
  });
}

// All 2^32 floats would take minutes; every bf16 boundary and its neighbours take none.
void test_narrowing() {
  const AdamHyper still{0, 1, 0, 1, 0, 0, 1, 1, 1};  // w - 0 / 1
  std::vector<float> master;
  for (std::uint32_t high = 0; high < 0x10000; ++high) {
    for (std::uint32_t low :
         {0x0000u, 0x0001u, 0x0fffu, 0x1000u, 0x1001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      const float w = std::bit_cast<float>((high << 16) | low);
      if (!std::isnan(w)) master.push_back(w);
    }
  }
  const auto n = static_cast<std::int64_t>(master.size());
  const std::vector<float> zero(master.size(), 0.0f);
  for (Isa isa : kIsas) {
    if (!isa_supported(isa)) continue;
    for (DType dtype : {DType::bf16, DType::f16}) {
      std::vector<float> w = master, m = zero, v = zero;
      std::vector<std::uint16_t> param(master.size());
      AdamArgs args{};
      args.param = param.data();
      args.grad = zero.data();
      set(args, Stream::m, m.data());
      set(args, Stream::v, v.data());
      set(args, Stream::master, w.data());
      args.n = n;
      args.param_dtype = dtype;
      args.hyper = still;
      adam_update(args, isa);
      long wrong = 0;
      for (std::size_t i = 0; i < master.size(); ++i) {
        // Nearest even by halves of the last place, in binary64.
        const double x = std::fabs(static_cast<double>(w[i]));
        int exponent = 0;
        std::frexp(x, &exponent);
        const int digits = dtype == DType::bf16 ? 8 : 11;
        const int least = dtype == DType::bf16 ? -133 : -24;
        const int place = std::max(exponent - digits, least);
        double rounded =
            std::isinf(x) ? x : std::ldexp(std::nearbyint(std::ldexp(x, -place)), place);
        const double limit = dtype == DType::bf16 ? 0x1p128 : 0x1p16;
        if (rounded >= limit) rounded = std::numeric_limits<double>::infinity();
        const std::uint16_t kept = param[i] & 0x7fff;
        const bool inf = kept == (dtype == DType::bf16 ? 0x7f80 : 0x7c00);
        const int width = digits - 1;
        const int biased = kept >> width;
        const int fraction = kept & ((1 << width) - 1);
        double got = biased == 0 ? std::ldexp(fraction, least)
                                 : std::ldexp(fraction + (1 << width), biased - 1 + least);
        if (inf) got = std::numeric_limits<double>::infinity();
        const bool sign = (param[i] & 0x8000) != 0;
        wrong += got != rounded || sign != std::signbit(w[i]) ? 1 : 0;
      }
      CHECK(wrong == 0);
    }
  }
}

void test_flushing_caller() {
#ifdef STOW_X86
  Bits bits;
  const Problem start(1000, DType::f32, DType::f32, true, bits);
  for (Isa isa : kIsas) {
    if (!isa_supported(isa)) continue;
    Problem want = start;
    Problem got = start;
    adam_update(want.args(0, 1000, hyper_of(0, true), false), isa);
    const unsigned before = _mm_getcsr();
    const unsigned flushing = before | 0x8040u | 0x6000u;  // FTZ, DAZ, towards zero
    _mm_setcsr(flushing);
    adam_update(got.args(0, 1000, hyper_of(0, true), false), isa);
    const unsigned after = _mm_getcsr();
    _mm_setcsr(before);
    CHECK(same(want, got));
    CHECK((after & ~0x3fu) == (flushing & ~0x3fu));
  }
#endif
}

double naive_norm(const std::vector<float>& x) {
  double lane[16] = {};
  for (std::size_t i = 0; i < x.size(); ++i) lane[i % 16] += static_cast<double>(x[i]) * x[i];
  for (int k = 0; k < 8; ++k) lane[k] += lane[k + 8];
  for (int k = 0; k < 4; ++k) lane[k] += lane[k + 4];
  lane[0] += lane[2];
  lane[1] += lane[3];
  return lane[0] + lane[1];
}

float widened(std::uint16_t bits, DType dtype) {
  if (dtype == DType::bf16) return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  const int exponent = (bits >> 10) & 31;
  const int fraction = bits & 1023;
  const double magnitude =
      exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(fraction + 1024, exponent - 25);
  return static_cast<float>((bits & 0x8000) != 0 ? -magnitude : magnitude);
}

void test_norm() {
  Bits bits;
  for (std::int64_t n : {0, 1, 15, 16, 17, 100, 4097, 65536}) {
    for (DType dtype : kDTypes) {
      std::vector<float> wide(static_cast<std::size_t>(n));
      std::vector<std::uint16_t> half(wide.size());
      for (std::size_t i = 0; i < wide.size(); ++i) {
        half[i] = static_cast<std::uint16_t>(bits.random() & 0xbbff);  // finite in both formats
        const auto any = static_cast<std::uint32_t>(bits.random()) & 0xff7fffffu;
        wide[i] = dtype == DType::f32 ? std::bit_cast<float>(any) : widened(half[i], dtype);
      }
      const void* data = dtype == DType::f32 ? static_cast<const void*>(wide.data()) : half.data();
      const double want = naive_norm(wide);
      CHECK(std::isfinite(want));
      for (Isa isa : kIsas) {
        if (!isa_supported(isa)) continue;
        const double got = squared_norm_block(data, dtype, n, isa);
        CHECK(std::bit_cast<std::uint64_t>(got) == std::bit_cast<std::uint64_t>(want));
      }
    }
  }
}

void test_norm_sees_infinity() {
  for (float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                    std::numeric_limits<float>::quiet_NaN()}) {
    std::vector<float> x(1000, std::numeric_limits<float>::max());
    for (Isa isa : kIsas) {
      if (!isa_supported(isa)) continue;
      CHECK(std::isfinite(squared_norm_block(x.data(), DType::f32, 1000, isa)));
      x[999] = bad;
      CHECK(!std::isfinite(squared_norm_block(x.data(), DType::f32, 1000, isa)));
      x[999] = 0.0f;
    }
  }
}

void test_probes() {
  for (Isa isa : kIsas) {
    if (!isa_supported(isa)) continue;
    constexpr std::int64_t n = 128;
    std::vector<float> p(n, 1.0f), g(n, 2.0f), m(n, 3.0f), v(n, 4.0f);
    seven_streams(p.data(), g.data(), m.data(), v.data(), n - 1, isa);
    CHECK(p[0] == 3.0f && m[126] == 5.0f && v[126] == 6.0f && p[127] == 1.0f);
    std::vector<std::uint16_t> p16(n, 0), g16(n, 0x3f80);
    mixed_streams(p16.data(), g16.data(), p.data(), m.data(), v.data(), n, isa);
    CHECK(p16[0] == 0x4080 && p16[127] == 0x4000 && p[127] == 2.0f && m[127] == 4.0f &&
          v[127] == 5.0f);
  }
}

void test_pool_runs_every_block_once() {
  for (int threads : {1, 2, 5}) {
    Pool mine(threads);
    CHECK(mine.threads() == threads);
    for (std::int64_t blocks : {0, 1, 2, 3, 100, 1000}) {
      std::vector<int> count(static_cast<std::size_t>(blocks),
                             0);  // plain: the pool orders the accesses
      mine.run(blocks, [&](std::int64_t block) { ++count[static_cast<std::size_t>(block)]; });
      bool once = true;
      for (int c : count) once = once && c == 1;
      CHECK(once);
    }
  }
}

void test_pool_takes_turns() {
  Pool mine(3);
  std::int64_t total = 0;  // plain: turns order the callers
  std::vector<std::thread> callers;
  std::mutex mutex;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&, caller] {
      for (int round = 0; round < 200; ++round) {
        std::atomic<std::int64_t> sum{0};
        mine.run(17, [&](std::int64_t block) { sum.fetch_add(block, std::memory_order_relaxed); });
        const std::lock_guard<std::mutex> lock(mutex);
        total += sum.load();
        if (caller == 0 && round % 50 == 0) mine.resize(1 + round / 50);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(total == 4 * 200 * 136);
}

void test_pool_wakes_from_sleep() {
  Pool mine(2);
  for (int round = 0; round < 20; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    std::atomic<int> done{0};
    mine.run(2, [&](std::int64_t) { done.fetch_add(1); });
    CHECK(done.load() == 2);
  }
}

void test_pool_in_a_forked_child() {
  set_pool_threads(3);
  std::atomic<int> done{0};
  pool().run(8, [&](std::int64_t) { done.fetch_add(1); });
  CHECK(done.load() == 8);
  CHECK(pool().threads() == 3);
  Pool* before = &pool();
  set_pool_threads(2);
  CHECK(pool().threads() == 2);
  CHECK(before == &pool());
#ifndef __SANITIZE_THREAD__  // which does not follow threads started after a fork
  const pid_t child = fork();
  if (child == 0) {
    done = 0;
    pool().run(8, [&](std::int64_t) { done.fetch_add(1); });
    _exit(done.load() == 8 && pool().threads() == 2 ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
#endif
}

}  // namespace

int main() {
  test_isas_agree();
  test_every_split_agrees();
  test_narrowing();
  test_flushing_caller();
  test_norm();
  test_norm_sees_infinity();
  test_probes();
  test_pool_runs_every_block_once();
  test_pool_takes_turns();
  test_pool_wakes_from_sleep();
  test_pool_in_a_forked_child();
  return report();
}
