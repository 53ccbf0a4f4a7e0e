#include "kernels/adam_formats.h"
#include "kernels/average_loop.h"
#include "kernels/norm_loop.h"
#include "kernels/simd_avx2.h"

namespace stow {

const KernelTable kAvx2Kernels = {
    adam_of<Avx2F32>,          average_of<Avx2F32>,       squared_norm_of<Avx2F32>,
    seven_streams_of<Avx2F32>, mixed_streams_of<Avx2F32>,
};

}  // namespace stow
