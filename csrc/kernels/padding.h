// The elements that do not fill a vector (or a group), on padded copies: every element goes through
// the same instructions wherever a range is cut. The average is not among them: a pass of its own
// updates it.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/kernel_table.h"

namespace stow {
namespace {

template <int kElements>
class Padding {
 public:
  // Elements [begin, begin + count) of `args`, then zeros.
  Padding(const AdamArgs& args, std::int64_t begin, std::int64_t count) : padded_(args) {
    streams_ = streams_of(args.param_dtype, args.format, args.amsgrad, false, specs_);
    const int param_bytes = args.param_dtype == DType::f32 ? 4 : 2;
    const int grad_bytes = args.grad_dtype == DType::f32 ? 4 : 2;
    pieces_[kParam] = piece(args.param, param_bytes, 1, begin, count);
    for (int k = 0; k < streams_; ++k) {
      void* data = args.states[index(k)];
      pieces_[k] = piece(data, specs_[k].bytes, specs_[k].per, begin, count);
      std::memcpy(copies_[k], pieces_[k].data, pieces_[k].bytes);
      padded_.states[index(k)] = copies_[k];
    }
    std::memcpy(copies_[kParam], pieces_[kParam].data, pieces_[kParam].bytes);
    std::memcpy(copies_[kGrad], static_cast<const char*>(args.grad) + begin * grad_bytes,
                static_cast<std::size_t>(count) * grad_bytes);
    padded_.param = copies_[kParam];
    padded_.grad = copies_[kGrad];
    padded_.first += begin;
    padded_.n = kElements;
  }

  const AdamArgs& args() const { return padded_; }

  void copy_back() const {
    for (int k = 0; k < streams_; ++k) {
      std::memcpy(pieces_[k].data, copies_[k], pieces_[k].bytes);
    }
    std::memcpy(pieces_[kParam].data, copies_[kParam], pieces_[kParam].bytes);
  }

 private:
  static constexpr int kParam = kMaxStreams;
  static constexpr int kGrad = kMaxStreams + 1;

  struct ByteRange {
    char* data;
    std::size_t bytes;
  };

  static ByteRange piece(void* data, int bytes, int per, std::int64_t begin, std::int64_t count) {
    const std::int64_t units = (count + per - 1) / per;
    return {static_cast<char*>(data) + begin / per * bytes,
            static_cast<std::size_t>(units * bytes)};
  }
  int index(int k) const { return static_cast<int>(specs_[k].stream); }

  AdamArgs padded_;
  StreamSpec specs_[kMaxStreams];
  int streams_;
  ByteRange pieces_[kMaxStreams + 1];
  alignas(64) char copies_[kMaxStreams + 2][kElements * 4] = {};
};

}  // namespace
}  // namespace stow
