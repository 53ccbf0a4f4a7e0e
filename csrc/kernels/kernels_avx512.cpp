#include "kernels/adam_formats.h"
#include "kernels/average_loop.h"
#include "kernels/norm_loop.h"
#include "kernels/simd_avx512.h"

namespace stow {

const KernelTable kAvx512Kernels = {
    adam_of<Avx512F32>,          average_of<Avx512F32>,       squared_norm_of<Avx512F32>,
    seven_streams_of<Avx512F32>, mixed_streams_of<Avx512F32>,
};

}  // namespace stow
