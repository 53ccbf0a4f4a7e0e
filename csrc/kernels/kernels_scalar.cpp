#include "kernels/adam_formats.h"
#include "kernels/average_loop.h"
#include "kernels/norm_loop.h"
#include "kernels/simd_scalar.h"

namespace stow {

const KernelTable kScalarKernels = {
    adam_of<ScalarF32>,          average_of<ScalarF32>,       squared_norm_of<ScalarF32>,
    seven_streams_of<ScalarF32>, mixed_streams_of<ScalarF32>,
};

}  // namespace stow
