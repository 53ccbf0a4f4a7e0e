// The state formats: every instruction set against the scalar kernels, bit by bit; any cut of a
// range; split masters against fp32 ones.
#include <bit>
#include <cstring>
#include <random>
#include <stdexcept>
#include <vector>

#include "kernels/kernels.h"
#include "tests/check.h"

using namespace stow;

namespace {

constexpr DType kDTypes[] = {DType::f32, DType::bf16, DType::f16};
constexpr StateFormat kFormats[] = {StateFormat::fp32, StateFormat::split, StateFormat::bf16,
                                    StateFormat::int8};

const std::vector<std::uint32_t> kSpecial32 = {
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007fffff, 0x00800000, 0x3f800000, 0xbf800000,
    0x7f7fffff, 0xff7fffff, 0x7f7f8000, 0x7f800000, 0xff800000, 0x7fc00000, 0x7f800001, 0xffc00001};
const std::vector<std::uint16_t> kSpecial16 = {0x0000, 0x8000, 0x0001, 0x8001, 0x7fff, 0x8001,
                                               0x0080, 0x3f80, 0xbf80, 0x7f7f, 0xff7f, 0x7f80,
                                               0xff80, 0x7f81, 0x7c00, 0x7bff, 0x7e00, 0xffff};

std::mt19937_64 random_bits{20240229};

enum class Fill { ordinary, any };

int bytes_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

std::uint64_t word(const std::vector<char>& array, std::size_t at, int bytes) {
  std::uint64_t value = 0;
  std::memcpy(&value, array.data() + at * bytes, bytes);
  return value;
}

void put(std::vector<char>& array, std::size_t at, int bytes, std::uint64_t value) {
  std::memcpy(array.data() + at * bytes, &value, bytes);
}

std::uint64_t any_word(int bytes) {
  const std::uint64_t r = random_bits();
  if ((r & 7) != 0 || bytes == 1) return r >> 16;
  if (bytes == 4) return kSpecial32[(r >> 8) % kSpecial32.size()];
  return kSpecial16[(r >> 8) % kSpecial16.size()];
}

// Between 2^-7 and 2 in fp32 and bf16, ordinary in fp16 too; `sign` cleared where it must not be
// negative.
std::uint64_t ordinary_word(int bytes, bool positive) {
  const std::uint64_t r = random_bits();
  const std::uint64_t sign = positive ? 0 : r >> 63;
  if (bytes == 4) return (sign << 31) | (0x3c000000 + (r & 0x03ffffff));
  if (bytes == 2) return (sign << 15) | (0x3c00 + (r & 0x03ff));
  return r & 0xff;
}

struct Problem {
  DType param_dtype, grad_dtype;
  StateFormat format;
  bool amsgrad;
  std::int64_t elements;
  std::vector<char> param, grad, states[kMaxStreams];
  StreamSpec specs[kMaxStreams];
  int streams;

  Problem(std::int64_t n, DType p, DType g, StateFormat f, bool ams, Fill fill)
      : param_dtype(p), grad_dtype(g), format(f), amsgrad(ams), elements(n) {
    streams = streams_of(p, f, ams, false, specs);
    make(param, n, bytes_of(p), fill, false);
    make(grad, n, bytes_of(g), fill, false);
    for (int k = 0; k < streams; ++k) {
      const bool positive = specs[k].stream != Stream::m && specs[k].stream != Stream::master;
      const std::int64_t units = (n + specs[k].per - 1) / specs[k].per;
      make(states[k], units, specs[k].bytes, fill, positive);
    }
  }

  static void make(std::vector<char>& array, std::int64_t n, int bytes, Fill fill, bool positive) {
    array.resize(static_cast<std::size_t>(n) * bytes);
    for (std::size_t i = 0; i < static_cast<std::size_t>(n); ++i) {
      put(array, i, bytes, fill == Fill::any ? any_word(bytes) : ordinary_word(bytes, positive));
    }
  }

  // From `first` on; the scales' groups are counted from there where it is no multiple of them.
  AdamArgs args(std::int64_t first, std::int64_t n, const AdamHyper& hyper, bool seed) {
    AdamArgs a{};
    a.param = param.data() + first * bytes_of(param_dtype);
    a.grad = grad.data() + first * bytes_of(grad_dtype);
    for (int k = 0; k < streams; ++k) {
      char* data = states[k].data() + first / specs[k].per * specs[k].bytes;
      a.states[static_cast<int>(specs[k].stream)] = data;
    }
    a.n = n;
    a.first = first;
    a.key = 7;
    a.param_dtype = param_dtype;
    a.grad_dtype = grad_dtype;
    a.format = format;
    a.amsgrad = amsgrad;
    a.seed_master = seed;
    a.hyper = hyper;
    return a;
  }

  std::vector<char>* stream(Stream which, int* bytes) {
    for (int k = 0; k < streams; ++k) {
      if (specs[k].stream != which) continue;
      *bytes = specs[k].bytes;
      return &states[k];
    }
    return nullptr;
  }

  bool splits() const { return param_dtype == DType::bf16 && format != StateFormat::fp32; }

  // Makes one NaN of all: which one comes out is not specified, and so are its low bits.
  void settle_nans() {
    const auto n = static_cast<std::size_t>(elements);
    for (Stream which : {Stream::m, Stream::v, Stream::vmax, Stream::master}) {
      int bytes = 0;
      std::vector<char>* array = stream(which, &bytes);
      if (array == nullptr || bytes == 1) continue;
      if (which == Stream::master && splits()) continue;
      for (std::size_t i = 0; i < n; ++i)
        settle(*array, i, bytes, bytes == 4 || which != Stream::master);
    }
    for (std::size_t i = 0; i < n; ++i) {
      if (settle(param, i, bytes_of(param_dtype), param_dtype != DType::f16) && splits()) {
        int bytes = 0;
        std::vector<char>& low = *stream(Stream::master, &bytes);
        put(low, i, bytes, 0);
        std::vector<char>& v = *stream(Stream::v, &bytes);
        const std::uint64_t sign = std::uint64_t{1} << (8 * bytes - 1);
        if (bytes > 1) put(v, i, bytes, word(v, i, bytes) & ~sign);
      }
    }
  }

  // `wide`: eight bits of exponent. The sign stays: a second moment's may say something else.
  static bool settle(std::vector<char>& array, std::size_t i, int bytes, bool wide) {
    const std::uint64_t sign = std::uint64_t{1} << (8 * bytes - 1);
    const std::uint64_t infinity = bytes == 4 ? 0x7f800000 : wide ? 0x7f80 : 0x7c00;
    const std::uint64_t bits = word(array, i, bytes);
    if ((bits & ~sign) <= infinity) return false;
    put(array, i, bytes, infinity + 1);
    return true;
  }
};

bool same(Problem a, Problem b) {
  a.settle_nans();
  b.settle_nans();
  bool equal = a.param == b.param && a.grad == b.grad;
  for (int k = 0; k < a.streams; ++k) equal = equal && a.states[k] == b.states[k];
  return equal;
}

AdamHyper hyper_of(int variant, bool l2) {
  AdamHyper h{0.1f, 0.999f, 0.001f, 1.0f, 0.0f, 0.01f, 31.6f, 1e-8f, 1.0f};
  if (l2) h.l2 = 0.01f;
  if (variant == 1) h = {0.9f, 0.5f, 0.5f, 0.99f, h.l2, 1e-3f, 1.41f, 0.0f, -0.37f};
  if (variant == 2) h = {1.0f, 0.0f, 1.0f, 1.0f, h.l2, 1e30f, 1.0f, 1e-30f, 1e-20f};
  return h;
}

bool exact(StateFormat format) {
  return format == StateFormat::fp32 || format == StateFormat::split;
}

template <class Body>
void for_every_case(Body body) {
  for (StateFormat format : kFormats) {
    for (DType p : kDTypes) {
      for (DType g : kDTypes) {
        for (int mode = 0; mode < 4; ++mode) {
          const bool amsgrad = (mode & 1) != 0;
          if (amsgrad && !exact(format)) continue;
          for (Fill fill : {Fill::ordinary, Fill::any}) {
            body(format, p, g, amsgrad, (mode & 2) != 0, fill);
          }
        }
      }
    }
  }
}

void test_isas_agree() {
  for_every_case([&](StateFormat f, DType p, DType g, bool amsgrad, bool l2, Fill fill) {
    for (std::int64_t n : {0, 1, 7, 16, 31, 33, 64, 127, 333, 1025}) {
      for (std::int64_t first : {0, 32, 5}) {
        if (first == 5 && f == StateFormat::int8) continue;
        const Problem start(n + first, p, g, f, amsgrad, fill);
        const AdamHyper hyper = hyper_of(static_cast<int>(n % 3), l2);
        const bool seed = n % 2 == 1;
        Problem want = start;
        adam_update(want.args(first, n, hyper, seed), Isa::scalar);
        for (Isa isa : {Isa::avx2, Isa::avx512, Isa::neon}) {
          if (!isa_supported(isa)) continue;
          Problem got = start;
          adam_update(got.args(first, n, hyper, seed), isa);
          CHECK(same(want, got));
        }
      }
    }
  });
}

void test_every_cut_agrees() {
  constexpr std::int64_t n = 200;
  for_every_case([&](StateFormat f, DType p, DType g, bool amsgrad, bool l2, Fill fill) {
    const Problem start(n, p, g, f, amsgrad, fill);
    const AdamHyper hyper = hyper_of(0, l2);
    for (Isa isa : kIsas) {
      if (!isa_supported(isa)) continue;
      Problem whole = start;
      adam_update(whole.args(0, n, hyper, false), isa);
      for (std::int64_t cut = 0; cut <= n; cut += f == StateFormat::int8 ? kGroup : 1) {
        Problem parts = start;
        adam_update(parts.args(0, cut, hyper, false), isa);
        adam_update(parts.args(cut, n - cut, hyper, false), isa);
        CHECK(same(whole, parts));
      }
    }
  });
}

// The same start in both formats, from masters that are the weights.
void test_split_masters_are_masters() {
  constexpr std::int64_t n = 5000;
  for (Isa isa : kIsas) {
    if (!isa_supported(isa)) continue;
    Problem wide(n, DType::bf16, DType::bf16, StateFormat::fp32, true, Fill::ordinary);
    Problem split(n, DType::bf16, DType::bf16, StateFormat::split, true, Fill::ordinary);
    split.param = wide.param;
    split.grad = wide.grad;
    for (int k = 0; k < 3; ++k) split.states[k] = wide.states[k];
    for (int step = 0; step < 200; ++step) {
      AdamHyper hyper = hyper_of(0, false);
      hyper.grad_factor = step % 3 == 0 ? -1.5f : 1.0f;
      hyper.step_size = 1e-4f;
      adam_update(wide.args(0, n, hyper, step == 0), isa);
      adam_update(split.args(0, n, hyper, step == 0), isa);
    }
    long wrong = 0;
    for (std::size_t i = 0; i < n; ++i) {
      const std::uint64_t v = word(split.states[1], i, 4) & 0x7fffffff;
      wrong += word(split.param, i, 2) != word(wide.param, i, 2);
      wrong += word(split.states[3], i, 2) != (word(wide.states[3], i, 4) & 0xffff);
      wrong += word(split.states[0], i, 4) != word(wide.states[0], i, 4);
      wrong += v != word(wide.states[1], i, 4);
    }
    CHECK(wrong == 0);
  }
}

void test_streams() {
  StreamSpec specs[kMaxStreams];
  CHECK(streams_of(DType::f32, StateFormat::split, false, false, specs) == 2);
  CHECK(streams_of(DType::bf16, StateFormat::split, true, false, specs) == 4);
  CHECK(specs[2].stream == Stream::vmax && specs[3].stream == Stream::master);
  CHECK(specs[3].bytes == 2 && specs[3].per == 1);
  CHECK(streams_of(DType::f16, StateFormat::split, false, false, specs) == 3 &&
        specs[2].bytes == 4);
  CHECK(streams_of(DType::bf16, StateFormat::int8, false, false, specs) == 5);
  CHECK(specs[3].stream == Stream::m_scale && specs[3].bytes == 2 && specs[3].per == kGroup);
  bool refused = false;
  try {
    streams_of(DType::f32, StateFormat::bf16, true, false, specs);
  } catch (const std::invalid_argument&) {
    refused = true;
  }
  CHECK(refused);
}

}  // namespace

int main() {
  test_streams();
  test_isas_agree();
  test_every_cut_agrees();
  test_split_masters_are_masters();
  return report();
}
