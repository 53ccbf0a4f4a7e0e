#include <stdexcept>

#include "kernels/kernels.h"

namespace stow {
namespace {

// The bytes of a master beside the parameter; 0: the parameter is its own.
int master_bytes(DType param, StateFormat format) {
  if (param == DType::f32) return 0;
  if (param == DType::f16 || format == StateFormat::fp32) return 4;
  return format == StateFormat::int8 ? 1 : 2;
}

int moment_bytes(StateFormat format) {
  if (format == StateFormat::int8) return 1;
  return format == StateFormat::bf16 ? 2 : 4;
}

}  // namespace

int streams_of(DType param, StateFormat format, bool amsgrad, bool ema,
               StreamSpec out[kMaxStreams]) {
  const bool exact = format == StateFormat::fp32 || format == StateFormat::split;
  if (amsgrad && !exact) {
    throw std::invalid_argument("amsgrad goes with the formats fp32 and split");
  }
  const int moment = moment_bytes(format);
  const int master = master_bytes(param, format);
  if (ema && master != 0 && master != 4) {
    throw std::invalid_argument("an average goes with masters in fp32: the format fp32");
  }
  int count = 0;
  out[count++] = {Stream::m, moment, 1};
  out[count++] = {Stream::v, moment, 1};
  if (amsgrad) out[count++] = {Stream::vmax, 4, 1};
  if (master != 0) out[count++] = {Stream::master, master, 1};
  if (format == StateFormat::int8) {
    out[count++] = {Stream::m_scale, 2, kGroup};
    out[count++] = {Stream::v_scale, 2, kGroup};
  }
  if (ema) out[count++] = {Stream::ema, 4, 1};
  return count;
}

}  // namespace stow
