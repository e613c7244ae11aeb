"""The row mover in 40 lines: gathers two heads of two pages, in Triton's interpreter or on a GPU."""

import torch
import triton
import triton.language as tl


@triton.jit
def move_rows(src, dst, src_units, dst_units, units, src_token, dst_token, TOKENS: tl.constexpr, WORDS: tl.constexpr):
    """Copy units of `TOKENS` rows of `WORDS` int64. A grid of 8 programs leaves the other SMs to the model."""
    src_token, dst_token = tl.multiple_of(src_token, 2), tl.multiple_of(dst_token, 2)  # so accesses are 16 bytes wide
    token, word = tl.arange(0, TOKENS)[:, None], tl.arange(0, WORDS)[None, :]
    for unit in range(tl.program_id(0), units, tl.num_programs(0)):
        src_unit = src + tl.multiple_of(tl.load(src_units + unit), 2)
        dst_unit = dst + tl.multiple_of(tl.load(dst_units + unit), 2)
        rows = tl.load(src_unit + token * src_token + word, eviction_policy="evict_first")  # no byte is read twice
        tl.store(dst_unit + token * dst_token + word, rows)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pool = torch.randn(8, 16, 4, 64, device=device).bfloat16()  # page, token, head, dim
    packed = torch.empty(2, 2, 16, 64, dtype=torch.bfloat16, device=device)  # page, head, token, dim
    row = 64 * 2 // 8  # int64 words
    pages, heads = torch.tensor([5, 2], device=device), torch.tensor([1, 2], device=device)
    src_units = (pages[:, None] * 16 * 4 * row + heads * row).flatten()  # a unit is a head of a page
    dst_units = torch.arange(4, device=device) * 16 * row
    moved = pool.view(torch.int64), packed.view(torch.int64), src_units, dst_units, len(src_units)
    move_rows[(8,)](*moved, src_token=4 * row, dst_token=row, TOKENS=16, WORDS=row)
    assert torch.equal(packed, pool[pages][:, :, heads].transpose(1, 2))


if __name__ == "__main__":
    main()
