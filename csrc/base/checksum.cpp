#include "base/checksum.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <vector>

#include "base/openmp_team.h"

#ifdef STOW_X86
#include <nmmintrin.h>
#endif

namespace stow {
namespace {

constexpr std::array<std::uint32_t, 256> make_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78u : 0u);
    table[byte] = crc;
  }
  return table;
}

constexpr std::array<std::uint32_t, 256> kTable = make_table();

struct PortableCrc {
  static std::uint32_t byte(std::uint32_t crc, std::uint8_t value) {
    return (crc >> 8) ^ kTable[(crc ^ value) & 0xff];
  }
  static std::uint32_t word(std::uint32_t crc, std::uint64_t value) {
    for (int k = 0; k < 8; ++k) crc = byte(crc, static_cast<std::uint8_t>(value >> (8 * k)));
    return crc;
  }
};

template <class Crc>
std::uint32_t four_crcs(const void* data, std::int64_t nbytes, std::uint32_t seed) {
  const char* at = static_cast<const char*>(data);
  std::uint32_t a = ~seed, b = ~seed + 1, c = ~seed + 2, d = ~seed + 3;  // registers, not memory
  for (; nbytes >= 32; nbytes -= 32, at += 32) {
    std::uint64_t words[4];
    std::memcpy(words, at, sizeof words);
    a = Crc::word(a, words[0]);
    b = Crc::word(b, words[1]);
    c = Crc::word(c, words[2]);
    d = Crc::word(d, words[3]);
  }
  std::uint32_t crc[4] = {a, b, c, d};
  for (int k = 0; nbytes >= 8; nbytes -= 8, at += 8, ++k) {
    std::uint64_t word;
    std::memcpy(&word, at, sizeof word);
    crc[k] = Crc::word(crc[k], word);
  }
  for (; nbytes > 0; --nbytes, ++at) {
    crc[0] = Crc::byte(crc[0], static_cast<std::uint8_t>(*at));
  }
  // In the upper half of a word, so that each of the four is shifted by another distance: CRCs are
  // linear, and what two of them have in common would cancel out.
  for (int k = 1; k < 4; ++k) crc[0] = Crc::word(crc[0], std::uint64_t{crc[k]} << 32);
  return crc[0];
}

#ifdef STOW_X86
// The instruction is named here, not for the whole file: this file runs on every x86-64. Clang has
// a name of its own for it, which older versions of GCC do not know.
#ifdef __clang__
#define STOW_CRC_TARGET "sse4.2,crc32"
#else
#define STOW_CRC_TARGET "sse4.2"
#endif
struct Sse42Crc {
  __attribute__((target(STOW_CRC_TARGET))) static std::uint32_t byte(std::uint32_t crc,
                                                                     std::uint8_t value) {
    return _mm_crc32_u8(crc, value);
  }
  __attribute__((target(STOW_CRC_TARGET))) static std::uint32_t word(std::uint32_t crc,
                                                                     std::uint64_t value) {
    return static_cast<std::uint32_t>(_mm_crc32_u64(crc, value));
  }
};

__attribute__((target(STOW_CRC_TARGET), flatten)) std::uint32_t checksum_sse42(const void* data,
                                                                               std::int64_t nbytes,
                                                                               std::uint32_t seed) {
  return four_crcs<Sse42Crc>(data, nbytes, seed);
}

const bool kHasInstruction = __builtin_cpu_supports("sse4.2") != 0;
#endif

constexpr std::int64_t kBlock = 1 << 20;

struct BlocksJob {
  const char* data;
  std::int64_t nbytes;
  std::vector<std::uint32_t> checksums;
  std::atomic<std::size_t> next{0};

  static void work(void* job) noexcept {
    auto& self = *static_cast<BlocksJob*>(job);
    for (;;) {
      const std::size_t block = self.next.fetch_add(1, std::memory_order_relaxed);
      if (block >= self.checksums.size()) return;
      const std::int64_t at = static_cast<std::int64_t>(block) * kBlock;
      self.checksums[block] = checksum(self.data + at, std::min(kBlock, self.nbytes - at), 0);
    }
  }
};

}  // namespace

std::uint32_t checksum_by_blocks(const void* data, std::int64_t nbytes) {
  BlocksJob job{
      static_cast<const char*>(data), nbytes,
      std::vector<std::uint32_t>(static_cast<std::size_t>((nbytes + kBlock - 1) / kBlock))};
  // Other threads, as autograd's of a device, have no team yet and would start one.
  const bool has_team = getpid() == static_cast<pid_t>(syscall(SYS_gettid));
  const TorchTeamScope scope;
  if (job.checksums.size() < 2 || !has_team || !run_on_team(0, BlocksJob::work, &job))
    BlocksJob::work(&job);
  const std::size_t bytes = job.checksums.size() * sizeof(std::uint32_t);
  return checksum(job.checksums.data(), static_cast<std::int64_t>(bytes), 0);
}

std::uint32_t checksum_portable(const void* data, std::int64_t nbytes, std::uint32_t seed) {
  return four_crcs<PortableCrc>(data, nbytes, seed);
}

std::uint32_t checksum(const void* data, std::int64_t nbytes, std::uint32_t seed) {
#ifdef STOW_X86
  if (kHasInstruction) return checksum_sse42(data, nbytes, seed);
#endif
  return checksum_portable(data, nbytes, seed);
}

}  // namespace stow
