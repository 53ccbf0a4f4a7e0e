// [Note: Random bits] 32 random bits for an element of a parameter at a step, from nothing but its
// index (modulo 2^32) and a key: cuts, threads and instruction sets change no bit. The index is
// mixed by three rounds of multiply and xor-shift, with the constants that hash-prospector's search
// found ("triple32"; two rounds show correlations between neighbours). Half of the key goes in
// before the rounds and half inside, so every key is a permutation of its own.
#pragma once

#include <cstdint>

#include "kernels/kernel_table.h"

namespace stow {
namespace {

template <class V>
class RandomBits {
 public:
  using I = typename V::I;

  // splitmix64: keys are counters, and should not look like it.
  explicit RandomBits(std::uint64_t key) {
    std::uint64_t z = key + 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    before_ = I::fill(static_cast<std::uint32_t>(z));
    inside_ = I::fill(static_cast<std::uint32_t>(z >> 32));
  }

  // Those of the elements from `index` on, one per lane.
  I at(std::int64_t index) const {
    I x = (I::ramp() + I::fill(static_cast<std::uint32_t>(index))) ^ before_;
    x = (x ^ x.template shr<17>()) * I::fill(0xed5ad4bbu);
    x = (x ^ x.template shr<11>()) + inside_;
    x = x * I::fill(0xac4c1b51u);
    x = (x ^ x.template shr<15>()) * I::fill(0x31848babu);
    return x ^ x.template shr<14>();
  }

 private:
  I before_, inside_;
};

}  // namespace
}  // namespace stow
