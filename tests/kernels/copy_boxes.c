/* A driver's cuMemcpy3DBatchAsync, for host memory, compiled from NVIDIA's own declaration of it: CUDA 12.8's or 13's.

   What the header says of a box is checked; a box that breaks it, or the legacy default stream, is refused. */
#include <cuda.h>
#include <string.h>

unsigned calls, boxes;
void *stream;

static int fits(const CUmemcpy3DOperand *operand, const CUextent3D *extent) {
    return operand->type == CU_MEMCPY_OPERAND_TYPE_POINTER && operand->op.ptr.rowLength >= extent->width &&
           operand->op.ptr.rowLength <= 0x7fffffff && operand->op.ptr.layerHeight >= extent->height;
}

static char *row(const CUmemcpy3DOperand *operand, size_t layer, size_t number) {
    return (char *)operand->op.ptr.ptr + (layer * operand->op.ptr.layerHeight + number) * operand->op.ptr.rowLength;
}

#if CUDA_VERSION >= 13000
CUresult CUDAAPI cuMemcpy3DBatchAsync(size_t count, CUDA_MEMCPY3D_BATCH_OP *list, unsigned long long flags,
                                      CUstream on) {
#else
CUresult CUDAAPI cuMemcpy3DBatchAsync(size_t count, CUDA_MEMCPY3D_BATCH_OP *list, size_t *failed,
                                      unsigned long long flags, CUstream on) {
    *failed = count;
#endif
    if (flags || !count || on == NULL || on == CU_STREAM_LEGACY) return CUDA_ERROR_INVALID_VALUE;
    calls++, boxes += count, stream = on;
    for (CUDA_MEMCPY3D_BATCH_OP *box = list; box < list + count; box++) {
        const CUextent3D *size = &box->extent;
        if (!size->width || !size->height || !size->depth || !fits(&box->src, size) || !fits(&box->dst, size) ||
            box->srcAccessOrder != CU_MEMCPY_SRC_ACCESS_ORDER_STREAM || box->flags > 1)
            return CUDA_ERROR_INVALID_VALUE;
        for (size_t layer = 0; layer < size->depth; layer++)
            for (size_t number = 0; number < size->height; number++)
                memcpy(row(&box->dst, layer, number), row(&box->src, layer, number), size->width);
    }
    return CUDA_SUCCESS;
}
