#include "kernels/adam_formats.h"
#include "kernels/average_loop.h"
#include "kernels/norm_loop.h"
#include "kernels/simd_neon.h"

namespace stow {

const KernelTable kNeonKernels = {
    adam_of<NeonF32>,          average_of<NeonF32>,       squared_norm_of<NeonF32>,
    seven_streams_of<NeonF32>, mixed_streams_of<NeonF32>,
};

}  // namespace stow
