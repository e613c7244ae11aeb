/* A driver's cuTensorMapEncodeTiled, compiled from NVIDIA's own declaration of it.

   What the header says of a map is checked, and what breaks it is refused. The map keeps what it was made of, in the
   order of `kept`, since what a real one keeps is opaque. */
#include <cuda.h>
#include <stdint.h>
#include <string.h>

unsigned encoded;

struct kept {
    cuuint64_t address, dims[2], pitch;
    cuuint32_t box[2];
};

static int bad(CUtensorMap *map, cuuint32_t rank, void *address, const cuuint64_t *dims, const cuuint64_t *pitches,
               const cuuint32_t *box, const cuuint32_t *steps) {
    if ((uintptr_t)map % 64 || rank < 1 || rank > 5 || (uintptr_t)address % 16 || box[0] * 8 % 16) return 1;
    for (cuuint32_t axis = 0; axis < rank; axis++)
        if (!dims[axis] || dims[axis] > 1ull << 32 || !box[axis] || box[axis] > 256 || !steps[axis] || steps[axis] > 8)
            return 1;
    for (cuuint32_t axis = 0; axis + 1 < rank; axis++) {
        cuuint64_t below = axis ? pitches[axis - 1] : dims[0] * 8;
        if (pitches[axis] % 16 || pitches[axis] >= 1ull << 40 || pitches[axis] < below) return 1;
    }
    return 0;
}

CUresult CUDAAPI cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                        const cuuint64_t *dims, const cuuint64_t *pitches, const cuuint32_t *box,
                                        const cuuint32_t *steps, CUtensorMapInterleave interleave,
                                        CUtensorMapSwizzle swizzle, CUtensorMapL2promotion fetch,
                                        CUtensorMapFloatOOBfill fill) {
    if (type != CU_TENSOR_MAP_DATA_TYPE_UINT64 || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE ||
        swizzle != CU_TENSOR_MAP_SWIZZLE_NONE || fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE ||
        fetch > CU_TENSOR_MAP_L2_PROMOTION_L2_256B || bad(map, rank, address, dims, pitches, box, steps))
        return CUDA_ERROR_INVALID_VALUE;
    if (rank != 2) return CUDA_ERROR_NOT_SUPPORTED; /* by this stand-in */
    struct kept kept = {(cuuint64_t)(uintptr_t)address, {dims[0], dims[1]}, pitches[0], {box[0], box[1]}};
    memset(map, 0, sizeof *map);
    memcpy(map, &kept, sizeof kept);
    encoded++;
    return CUDA_SUCCESS;
}
