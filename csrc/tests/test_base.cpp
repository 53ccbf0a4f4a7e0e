// What everything stands on: the checksum with and without the processor's instruction.
#include <algorithm>
#include <cstdio>
#include <random>
#include <utility>
#include <vector>

#include "base/checksum.h"
#include "base/trace.h"
#include "check.h"

namespace stow {
namespace {

std::vector<unsigned char> random_bytes(std::size_t count) {
  std::mt19937_64 random(7);
  std::vector<unsigned char> bytes(count);
  for (auto& byte : bytes) byte = static_cast<unsigned char>(random());
  return bytes;
}

void test_portable_is_the_same() {
  const auto bytes = random_bytes(5000);
  for (std::int64_t n : {0, 1, 7, 8, 9, 31, 32, 33, 63, 64, 100, 4096, 4999}) {
    for (std::uint32_t seed : {0u, 1u, 0xffffffffu, 0x12345678u}) {
      CHECK(checksum(bytes.data(), n, seed) == checksum_portable(bytes.data(), n, seed));
    }
  }
}

void test_every_single_bit_is_seen() {
  auto bytes = random_bytes(300);
  const std::uint32_t whole = checksum(bytes.data(), 300, 0);
  for (int bit = 0; bit < 300 * 8; ++bit) {
    bytes[bit / 8] ^= static_cast<unsigned char>(1 << bit % 8);
    CHECK(checksum(bytes.data(), 300, 0) != whole);
    bytes[bit / 8] ^= static_cast<unsigned char>(1 << bit % 8);
  }
  CHECK(checksum(bytes.data(), 300, 0) == whole);
}

void test_exchanged_words_are_seen() {
  auto bytes = random_bytes(4096);
  const std::uint32_t whole = checksum(bytes.data(), 4096, 0);
  for (int step : {8, 16, 32, 64, 512, 1024}) {
    for (int k = 0; k < step; ++k) std::swap(bytes[k], bytes[k + step]);
    CHECK(checksum(bytes.data(), 4096, 0) != whole);
    for (int k = 0; k < step; ++k) std::swap(bytes[k], bytes[k + step]);
  }
}

void test_zeros_of_other_lengths_differ() {
  const std::vector<unsigned char> zeros(4096);
  CHECK(checksum(zeros.data(), 4096, 0) != checksum(zeros.data(), 4088, 0));
  CHECK(checksum(zeros.data(), 0, 0) != checksum(zeros.data(), 0, 1));
}

void test_blocks_are_told_apart() {
  auto bytes = random_bytes((3 << 20) + 12345);
  const auto count = static_cast<std::int64_t>(bytes.size());
  const std::uint32_t whole = checksum_by_blocks(bytes.data(), count);
  for (std::size_t at : {std::size_t{0}, std::size_t{1} << 20, bytes.size() - 1}) {
    bytes[at] ^= 1;
    CHECK(checksum_by_blocks(bytes.data(), count) != whole);
    bytes[at] ^= 1;
  }
  CHECK(checksum_by_blocks(bytes.data(), count) == whole);
  CHECK(checksum_by_blocks(bytes.data(), count - 1) != whole);
  std::rotate(bytes.begin(), bytes.begin() + (1 << 20), bytes.begin() + (2 << 20));
  CHECK(checksum_by_blocks(bytes.data(), count) != whole);
}

// Known forever: what is on disks today must be readable tomorrow.
void test_known_answers() {
  unsigned char bytes[100];
  for (int k = 0; k < 100; ++k) bytes[k] = static_cast<unsigned char>(k);
  CHECK(checksum(bytes, 100, 0) == 0xcf54cbcfu);
  CHECK(checksum(bytes, 100, 5) == 0x8853b242u);
}

void report_speed() {
  const auto bytes = random_bytes(1 << 20);
  std::uint32_t crc = 0;
  const double start = now();
  for (int k = 0; k < 50; ++k) crc = checksum(bytes.data(), 1 << 20, crc);
  std::printf("checksum: %.1f GB/s (%08x)\n", 50 * (1 << 20) / (now() - start) / 1e9, crc);
}

}  // namespace
}  // namespace stow

int main() {
  stow::test_portable_is_the_same();
  stow::test_every_single_bit_is_seen();
  stow::test_exchanged_words_are_seen();
  stow::test_zeros_of_other_lengths_differ();
  stow::test_known_answers();
  stow::test_blocks_are_told_apart();
  stow::report_speed();
  return stow::report();
}
