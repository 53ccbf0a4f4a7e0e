// Kernels: the Adam update, norms, the pool of threads that both run on.
#include <algorithm>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "base/checksum.h"
#include "base/metered.h"
#include "base/pool.h"
#include "bindings/bindings.h"
#include "pipeline/chunk.h"

namespace stow {

DType parse_dtype(const std::string& name) {
  if (name == "float32") return DType::f32;
  if (name == "bfloat16") return DType::bf16;
  if (name == "float16") return DType::f16;
  throw std::invalid_argument("dtype " + name + ": one of float32, bfloat16, float16");
}

Isa parse_isa(const std::optional<std::string>& name) {
  if (!name) return best_isa();
  for (Isa isa : kIsas) {
    if (*name == isa_name(isa)) {
      if (!isa_supported(isa)) throw std::invalid_argument("this CPU does not run " + *name);
      return isa;
    }
  }
  throw std::invalid_argument("isa " + *name + ": one of scalar, avx2, avx512, neon");
}

StateFormat parse_format(const std::string& name) {
  if (name == "fp32") return StateFormat::fp32;
  if (name == "split") return StateFormat::split;
  if (name == "bf16") return StateFormat::bf16;
  if (name == "int8") return StateFormat::int8;
  throw std::invalid_argument("format " + name + ": one of fp32, split, bf16, int8");
}

namespace {

using StreamTuple = std::tuple<std::string, int, int>;

std::vector<StreamTuple> stream_tuples(const std::string& dtype, const std::string& format,
                                       bool amsgrad, bool ema) {
  constexpr const char* kNames[] = {"m", "v", "vmax", "master", "m_scale", "v_scale", "ema"};
  StreamSpec specs[kMaxStreams];
  const int count = streams_of(parse_dtype(dtype), parse_format(format), amsgrad, ema, specs);
  std::vector<StreamTuple> tuples;
  for (int k = 0; k < count; ++k) {
    tuples.emplace_back(kNames[static_cast<int>(specs[k].stream)], specs[k].bytes, specs[k].per);
  }
  return tuples;
}

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (Isa isa : kIsas) {
    if (isa_supported(isa)) names.emplace_back(isa_name(isa));
  }
  return names;
}

using Hyper = std::tuple<float, float, float, float, float, float, float, float, float, float>;

AdamHyper parse_hyper(const Hyper& h) {
  return {std::get<0>(h), std::get<1>(h), std::get<2>(h), std::get<3>(h), std::get<4>(h),
          std::get<5>(h), std::get<6>(h), std::get<7>(h), std::get<8>(h), std::get<9>(h)};
}

// The same arguments from element `from` on, a multiple of kGroup.
AdamArgs advanced(AdamArgs args, std::int64_t from, std::int64_t count) {
  args.param = static_cast<char*>(args.param) + from * (args.param_dtype == DType::f32 ? 4 : 2);
  args.grad = static_cast<const char*>(args.grad) + from * (args.grad_dtype == DType::f32 ? 4 : 2);
  StreamSpec specs[kMaxStreams];
  const int streams = streams_of(args.param_dtype, args.format, args.amsgrad, args.ema, specs);
  for (int k = 0; k < streams; ++k) {
    void*& data = args.states[static_cast<int>(specs[k].stream)];
    data = static_cast<char*>(data) + from / specs[k].per * specs[k].bytes;
  }
  args.first += from;
  args.n = count;
  return args;
}

// Addresses in the order of Stream. amsgrad is on where there is a vmax, and an average is kept
// where there is one.
void take_states(const std::vector<Address>& states, AdamArgs& args) {
  if (states.size() != kMaxStreams) {
    throw std::invalid_argument("states: seven addresses, 0 for those that the format has not got");
  }
  for (int k = 0; k < kMaxStreams; ++k) args.states[k] = at<void>(states[k]);
  args.amsgrad = args.states[static_cast<int>(Stream::vmax)] != nullptr;
  args.ema = args.states[static_cast<int>(Stream::ema)] != nullptr;
}

void run_adam(const AdamArgs& args, Isa isa, bool on_pool) {
  if (!on_pool) return adam_update(args, isa);
  const std::int64_t blocks = (args.n + kUpdateBlock - 1) / kUpdateBlock;
  pool().run(blocks, [&](std::int64_t b) {
    const std::int64_t from = b * kUpdateBlock;
    adam_update(advanced(args, from, std::min(kUpdateBlock, args.n - from)), isa);
  });
}

double squared_norm(const char* grad, std::int64_t n, DType dtype, Isa isa) {
  const std::int64_t blocks = (n + kNormBlock - 1) / kNormBlock;
  std::vector<double> partial(static_cast<std::size_t>(blocks));
  pool().run(blocks, [&](std::int64_t b) {
    const std::int64_t from = b * kNormBlock;
    const char* start = grad + from * (dtype == DType::f32 ? 4 : 2);
    partial[static_cast<std::size_t>(b)] =
        squared_norm_block(start, dtype, std::min(kNormBlock, n - from), isa);
  });
  double sum = 0;
  for (double value : partial) sum += value;
  return sum;
}

// Of each row; the bits do not depend on how many rows there are.
std::vector<double> squared_norms(const char* grad, std::int64_t rows, std::int64_t columns,
                                  DType dtype, Isa isa) {
  std::vector<double> norms(static_cast<std::size_t>(rows));
  const std::int64_t itemsize = dtype == DType::f32 ? 4 : 2;
  const std::int64_t at_once =
      std::max<std::int64_t>(1, kNormBlock / std::max<std::int64_t>(1, columns));
  pool().run((rows + at_once - 1) / at_once, [&](std::int64_t task) {
    for (std::int64_t row = task * at_once; row < std::min(rows, (task + 1) * at_once); ++row) {
      double sum = 0;
      for (std::int64_t from = 0; from < columns; from += kNormBlock) {
        const char* start = grad + (row * columns + from) * itemsize;
        sum += squared_norm_block(start, dtype, std::min(kNormBlock, columns - from), isa);
      }
      norms[static_cast<std::size_t>(row)] = sum;
    }
  });
  return norms;
}

}  // namespace

void bind_kernels(nb::module_& m) {
  m.def("supported_isas", &supported_isas);
  m.def("best_isa", [] { return std::string(isa_name(best_isa())); });
  m.def("set_pool_threads", &set_pool_threads, "threads"_a);
  m.def("pool_threads", [] { return pool().threads(); });
  m.def(
      "slow_down",
      [](double disk_bytes_per_s, double update_elements_per_s) {
        disk_lane.set(disk_bytes_per_s);
        update_lane.set(update_elements_per_s);
      },
      nb::kw_only(), "disk_bytes_per_s"_a = 0.0, "update_elements_per_s"_a = 0.0,
      "for tests: no faster than this, on backend threads; 0: as fast as it goes");
  m.def(
      "adam_update",
      [](Address param, Address grad, const std::vector<Address>& states, std::int64_t n,
         const std::string& param_dtype, const std::string& grad_dtype, const std::string& format,
         std::int64_t first, std::uint64_t key, bool seed_master, const Hyper& hyper,
         const std::optional<std::string>& isa, bool on_pool) {
        AdamArgs args{};
        args.param = at<void>(param);
        args.grad = at<void>(grad);
        take_states(states, args);
        args.n = n;
        args.first = first;
        args.key = key;
        args.param_dtype = parse_dtype(param_dtype);
        args.grad_dtype = parse_dtype(grad_dtype);
        args.format = parse_format(format);
        args.seed_master = seed_master;
        args.hyper = parse_hyper(hyper);
        const Isa chosen = parse_isa(isa);
        nb::gil_scoped_release release;
        run_adam(args, chosen, on_pool);
      },
      "param"_a, "grad"_a, "states"_a, "n"_a, "param_dtype"_a, "grad_dtype"_a, "format"_a,
      "first"_a, "key"_a, "seed_master"_a, "hyper"_a, "isa"_a.none(), "on_pool"_a,
      "`states`: addresses of m, v, vmax, master, m_scale, v_scale, ema; 0 where there is none");
  m.def("streams_of", &stream_tuples, "dtype"_a, "format"_a, "amsgrad"_a, "ema"_a,
        "(name, bytes, per) of each stream: `bytes` for every `per` elements");
  m.def(
      "squared_norm",
      [](Address grad, std::int64_t n, const std::string& dtype,
         const std::optional<std::string>& isa) {
        const DType parsed = parse_dtype(dtype);
        const Isa chosen = parse_isa(isa);
        nb::gil_scoped_release release;
        return squared_norm(at<const char>(grad), n, parsed, chosen);
      },
      "grad"_a, "n"_a, "dtype"_a, "isa"_a.none());
  m.def(
      "squared_norms",
      [](Address grad, std::int64_t rows, std::int64_t columns, const std::string& dtype,
         const std::optional<std::string>& isa) {
        const DType parsed = parse_dtype(dtype);
        const Isa chosen = parse_isa(isa);
        nb::gil_scoped_release release;
        return squared_norms(at<const char>(grad), rows, columns, parsed, chosen);
      },
      "grad"_a, "rows"_a, "columns"_a, "dtype"_a, "isa"_a.none());
  m.def(
      "seven_streams",
      [](Address p, Address g, Address m_, Address v, std::int64_t n) {
        nb::gil_scoped_release release;
        pool().run((n + kUpdateBlock - 1) / kUpdateBlock, [&](std::int64_t b) {
          const std::int64_t from = b * kUpdateBlock;
          seven_streams(at<float>(p) + from, at<float>(g) + from, at<float>(m_) + from,
                        at<float>(v) + from, std::min(kUpdateBlock, n - from), best_isa());
        });
      },
      "p"_a, "g"_a, "m"_a, "v"_a, "n"_a);
  m.def(
      "mixed_streams",
      [](Address p16, Address g16, Address w, Address m_, Address v, std::int64_t n) {
        nb::gil_scoped_release release;
        pool().run((n + kUpdateBlock - 1) / kUpdateBlock, [&](std::int64_t b) {
          const std::int64_t from = b * kUpdateBlock;
          mixed_streams(at<std::uint16_t>(p16) + from, at<std::uint16_t>(g16) + from,
                        at<float>(w) + from, at<float>(m_) + from, at<float>(v) + from,
                        std::min(kUpdateBlock, n - from), best_isa());
        });
      },
      "p16"_a, "g16"_a, "w"_a, "m"_a, "v"_a, "n"_a);
  m.def(
      "checksum",
      [](Address data, std::int64_t nbytes, std::uint32_t seed) {
        return checksum(at<const char>(data), nbytes, seed);
      },
      nb::call_guard<nb::gil_scoped_release>(), "data"_a, "nbytes"_a, "seed"_a = 0);
  m.def(
      "checksum_by_blocks",
      [](Address data, std::int64_t nbytes) {
        return checksum_by_blocks(at<const char>(data), nbytes);
      },
      nb::call_guard<nb::gil_scoped_release>(), "data"_a, "nbytes"_a);
}

}  // namespace stow
