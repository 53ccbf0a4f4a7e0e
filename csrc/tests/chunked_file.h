// Parameters cut into chunks, and the file that keeps their states.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "check.h"
#include "io/engine.h"
#include "training.h"

namespace stow {

struct RigOptions {
  std::vector<Shape> shapes = std::vector<Shape>(3, Shape{{}, 2048});
  std::int64_t capacity = 1024;  // elements of a chunk
  std::int64_t gap = 0;          // elements between parameters
  std::vector<int> resident;     // chunks with memory of their own
  int small_slots = 0;           // of other chunks with one parameter
  Order order = Order::alternating;
  int slots = 2;
  int few = 1;
  bool durable = false;  // chunks are nowhere until they are written, and commits write weights
};

// Three areas, each with a place for every chunk.
class ChunkedFile {
 public:
  static constexpr int kAreas = 3;

  explicit ChunkedFile(const RigOptions& options) {
    lay_out(options.shapes, options);
    const char* folder = std::getenv("TMPDIR");
    std::string path = std::string(folder != nullptr ? folder : "/var/tmp") + "/stow-test-XXXXXX";
    fd_ = mkstemp(path.data());
    unlink(path.c_str());
    CHECK(ftruncate(fd_, kAreas * area_bytes_) == 0);
  }

  ~ChunkedFile() { close(fd_); }
  ChunkedFile(const ChunkedFile&) = delete;
  ChunkedFile& operator=(const ChunkedFile&) = delete;

  // The engine ends before the file.
  void add_to(Engine& engine) { file_ = engine.add_file({fd_, 1, false}); }

  int chunks() const { return static_cast<int>(specs_.size()); }
  const ChunkSpec& spec(int chunk) const { return specs_[chunk]; }
  const std::vector<ChunkSpec>& specs() const { return specs_; }

  DiskPosition place_in(int area, std::size_t chunk) const {
    return {file_, area * area_bytes_ + at_[chunk]};
  }

  std::vector<char> read(DiskPosition place, const Layout& layout) const {
    std::vector<char> bytes(layout.weight().file_at + layout.weight().bytes);
    CHECK(pread(fd_, bytes.data(), bytes.size(), place.offset) >= 0);
    return bytes;
  }

  std::vector<char> read_area(int area) const {
    std::vector<char> bytes(area_bytes_);
    CHECK(pread(fd_, bytes.data(), bytes.size(), area * area_bytes_) ==
          static_cast<ssize_t>(bytes.size()));
    return bytes;
  }

  void flip_byte(std::int64_t offset) {
    char byte = 0;
    CHECK(pread(fd_, &byte, 1, offset) == 1);
    byte = static_cast<char>(byte ^ 1);
    CHECK(pwrite(fd_, &byte, 1, offset) == 1);
  }

  // Whether a chunk of the parameter also has one of `others`.
  bool shares_a_chunk(int parameter, const std::vector<char>& others) const {
    return std::any_of(specs_.begin(), specs_.end(), [&](const ChunkSpec& spec) {
      bool mine = false, theirs = false;
      for (const Segment& s : spec.segments) {
        mine = mine || s.parameter == parameter;
        theirs = theirs || others[s.parameter];
      }
      return mine && theirs;
    });
  }
  std::int64_t stored_bytes() const {
    std::int64_t sum = 0;
    for (const ChunkSpec& spec : specs_) sum += is_resident(spec) ? 0 : Layout(spec).state_bytes();
    return sum;
  }
  static bool is_resident(const ChunkSpec& spec) { return spec.resident[0] != nullptr; }

 private:
  // Parameters of one family one after the other, cut at every `capacity`.
  void lay_out(const std::vector<Shape>& shapes, const RigOptions& options) {
    std::vector<char> done(shapes.size());
    for (std::size_t first = 0; first < shapes.size(); ++first) {
      if (done[first]) continue;
      const Family& family = shapes[first].family;
      std::int64_t position = 0;
      const std::size_t base = specs_.size();
      for (std::size_t p = first; p < shapes.size(); ++p) {
        const Shape& shape = shapes[p];
        if (shape.family.param_dtype != family.param_dtype ||
            shape.family.format != family.format || shape.family.amsgrad != family.amsgrad ||
            shape.family.ema != family.ema) {
          continue;
        }
        done[p] = 1;
        for (std::int64_t from = 0; from < shape.count;) {
          const std::int64_t chunk = (position + from) / options.capacity;
          const std::int64_t at = (position + from) % options.capacity;
          const std::int64_t count = std::min(shape.count - from, options.capacity - at);
          while (static_cast<std::int64_t>(specs_.size() - base) <= chunk)
            add_spec(family, options.capacity);
          specs_[base + chunk].segments.push_back({static_cast<int>(p), from, at, count});
          from += count;
        }
        position += (shape.count + 31) / 32 * 32 + options.gap;
      }
      const Segment& last = specs_.back().segments.back();
      specs_.back().elements = (last.chunk_offset + last.count + 31) / 32 * 32;
    }
    for (const ChunkSpec& spec : specs_) {
      const Layout layout(spec);
      at_.push_back(area_bytes_);
      area_bytes_ += layout.weight().file_at + layout.weight().bytes;
    }
    for (const int c : options.resident) {
      const Layout layout(specs_[c]);
      for (int k = 0; k < layout.streams; ++k) {
        homes_.emplace_back(layout.parts[k].length(specs_[c].elements));
        specs_[c].resident[k] = homes_.back().data();
      }
    }
  }

  void add_spec(const Family& family, std::int64_t elements) {
    ChunkSpec spec;
    spec.family = family;
    spec.elements = elements;
    specs_.push_back(spec);
  }

  int fd_ = -1;
  int file_ = -1;  // the engine's number
  std::int64_t area_bytes_ = 0;
  std::vector<ChunkSpec> specs_;
  std::vector<std::int64_t> at_;          // of a chunk, in an area
  std::vector<std::vector<char>> homes_;  // of resident chunks
};

}  // namespace stow
