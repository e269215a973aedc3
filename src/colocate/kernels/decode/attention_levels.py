"""The kernels of decode attention, which `attention.py` launches.

B rows (one new token each), H query heads over K key-value heads of D values, R = H / K. The state of a
query's running softmax (arXiv 1805.02867) is `maximum`, the largest score so far in base 2; `total`, the sum
of the weights 2^(score - maximum); and `acc` [D], the sum of the values with these weights. The output is
acc / total, and the log-sum-exp, in base 2, maximum + log2(total). Arguments of several kernels:

    data        qkv [NUM_PARTS, B, H + 2K, D] as the product left it, the parts yet to be summed; cos, sin
                [positions, D]; q_norm, k_norm [D] or None; k_cache, v_cache [pages, K, PAGE_SIZE, D];
                block_tables [B, pages], page numbers; context_lens [B], the new token included, 0 where a row
                is finished; out [B, H, D]
    partial     partial_outputs [slots, H, D] and partial_lses [slots, H] float32: normalised outputs over
                some of a row's keys. The slots of shared prefixes come first; from num_prefix_slots on each
                row has NUM_SPLITS of its own. Row r's prefix has num_partials[r] slots from first_slots[r] on
                In 8 bits k_cache and v_cache are bytes, and the scales of a head's vectors (`int8.quantize`)
                are behind its part of a page
    *_stride    from one row, page or table to the next, in elements
    scale_log2  the scores' scale times log2(e); eps, OFFSET and NORMS_LAST belong to the heads' norms,
                DISTANCE to their rotation (`definitions.Rotation`)
    shapes      NUM_KV_HEADS = K, RATIO = R, HEAD_DIM = D, PADDED_DIM: D rounded up to a power of two,
                NUM_QUERIES: query vectors of a program, padding included, TILE: keys that are read at a time,
                WINDOW: keys that a query sees, or 0 for all, HEAD_BLOCK: elements from one head's part of a
                page to the next
    IN_ASM      whether keys and values in 8 bits are unpacked by PTX; Triton's interpreter has none
    OVERLAPS    the next kernel may start before this one ends, and waits (`gdc_wait`) for its results
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from colocate.kernels.decode.attention_8bit import attend_8bit, narrowed_queries, quantized_heads
from colocate.kernels.fp8.quantize_int8 import exponents, factors, numbers
from colocate.kernels.layer.norms import inverse_rms, rms_normed
from colocate.kernels.layer.rotary import turned

# The running maximum starts here and not at minus infinity, whose difference from itself is NaN.
_LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def _is_first(dims, HEAD_DIM: tl.constexpr, DISTANCE: tl.constexpr):
    """Whether the values of a head at `dims` are the first of their pairs."""
    if DISTANCE is None:
        is_first = dims < HEAD_DIM // 2
    elif DISTANCE == 1:
        is_first = dims % 2 == 0
    else:
        is_first = dims < DISTANCE
    return is_first


@triton.jit
def _partners(dims, HEAD_DIM: tl.constexpr, DISTANCE: tl.constexpr):
    """The places of the other values of the pairs; for values that are not turned, their own."""
    HALF: tl.constexpr = HEAD_DIM // 2
    if DISTANCE is None:
        partners = tl.where(dims < HALF, dims + HALF, dims - HALF)
    elif DISTANCE == 1:
        partners = dims ^ 1
    else:
        partners = tl.where(dims < DISTANCE, dims + DISTANCE, dims - DISTANCE)
        partners = tl.where(dims < 2 * DISTANCE, partners, dims)
    return partners


@triton.jit
def _angles(cos, sin, positions, dims, mask, HEAD_DIM: tl.constexpr, DISTANCE: tl.constexpr):
    """Cosines and sines at `positions`, shaped like `mask` [queries, D]; the first values' sines are negated.

    They are read once per query: in the layout of the heads they need no exchange between threads, and all
    but the first read hit the L1 cache.
    """
    first = tl.maximum(positions, 0).to(tl.int64) * HEAD_DIM
    cosine = tl.load(cos + first + dims, mask=mask, other=0.0).to(tl.float32)
    sine = tl.load(sin + first + dims, mask=mask, other=0.0).to(tl.float32)
    return cosine, tl.where(_is_first(dims, HEAD_DIM, DISTANCE), -sine, sine)


@triton.jit
def _head_values(pointers, mask, part_stride, NUM_PARTS: tl.constexpr, DTYPE: tl.constexpr):
    """Values of heads in the model's type: `qkv` is the sum of NUM_PARTS parts, `part_stride` apart."""
    values = tl.load(pointers, mask=mask, other=0.0)
    for part in tl.static_range(1, NUM_PARTS):
        values += tl.load(pointers + part * part_stride, mask=mask, other=0.0)
    return values.to(DTYPE)


@triton.jit
def _rotated(
    heads, part_stride, dims, mask, cosine, sine, norm, eps,
    NUM_PARTS: tl.constexpr, HEAD_DIM: tl.constexpr, OFFSET: tl.constexpr, DISTANCE: tl.constexpr,
    NORMS_LAST: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The heads [queries, D] that begin at `heads`, normed (if there is a norm) and rotated, or rotated and
    normed.

    Values are rounded where `rotary.rotate_and_store` rounds, so that prompts and completions get equal keys.
    """
    partners = _partners(dims, HEAD_DIM, DISTANCE)
    x = _head_values(heads + dims, mask, part_stride, NUM_PARTS, DTYPE).to(tl.float32)
    partner = _head_values(heads + partners, mask, part_stride, NUM_PARTS, DTYPE).to(tl.float32)
    if norm is not None and not NORMS_LAST:
        inverse = inverse_rms(tl.sum(x * x, axis=1), HEAD_DIM, eps)[:, None]
        weight = tl.load(norm + dims, mask=mask, other=0.0).to(tl.float32)
        partner_weight = tl.load(norm + partners, mask=mask, other=0.0).to(tl.float32)
        x = rms_normed(x, inverse, weight, DTYPE, OFFSET).to(tl.float32)
        partner = rms_normed(partner, inverse, partner_weight, DTYPE, OFFSET).to(tl.float32)
    x = turned(x, partner, cosine, sine, 1, DTYPE, True)
    if norm is not None and NORMS_LAST:
        wide = x.to(tl.float32)
        inverse = inverse_rms(tl.sum(wide * wide, axis=1), HEAD_DIM, eps)[:, None]
        weight = tl.load(norm + dims, mask=mask, other=0.0).to(tl.float32)
        x = rms_normed(wide, inverse, weight, DTYPE, OFFSET)
    return x


@triton.jit
def _attend(
    q, maximum, total, acc, k_head, v_head, k_stride, v_stride, table, page, first_tile, end_tile,
    first_visible, end_visible, scale_log2,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Continue the running softmax of `q` [queries, D] with the tiles `first_tile` .. `end_tile` - 1.

    A tile is TILE tokens of one page, and tile t holds the positions from t * TILE on. `table` is the row's
    block table, from which the caller has already read `page`, the page of the first tile. A query sees
    the positions before `end_visible` and, with a window, from `first_visible` [queries, 1] on. `k_head` and
    `v_head` point to the key-value head in page 0.

    When a tile raises the maximum from m to m', `total` and `acc` are multiplied by 2^(m - m'), so that all
    weights are relative to one maximum again. Returns `maximum` [queries], `total` [queries] and `acc`
    [queries, D], unnormalised.
    """
    TILES_PER_PAGE: tl.constexpr = PAGE_SIZE // TILE
    tokens = tl.arange(0, TILE)
    dims = tl.arange(0, PADDED_DIM)
    offsets = tokens[:, None] * HEAD_DIM + dims[None, :]
    # For few queries the tile is divided among the warps, which would wait for each other to sum it up: then
    # weights are added up by their place in a tile, and over the places at the end.
    BY_PLACE: tl.constexpr = q.shape[0] < 64
    if BY_PLACE:
        total = tl.where((tokens == 0)[None, :], total[:, None], 0.0)
    # The number of the next page is on its way while this one is in use: a load whose address waits for
    # another load would wait twice.
    for tile in tl.range(first_tile, end_tile):
        following = tile + 1
        next_page = tl.load(table + following // TILES_PER_PAGE, mask=following < end_tile, other=0)
        positions = tile * TILE + tokens
        is_stored = positions < end_visible
        # Masking the scores is not enough: a weight of zero times a NaN from an unused slot would be NaN.
        mask = is_stored[:, None]
        if HEAD_DIM != PADDED_DIM:
            mask = mask & (dims < HEAD_DIM)[None, :]
        within_page = (tile % TILES_PER_PAGE) * (TILE * HEAD_DIM)
        k = tl.load(k_head + page.to(tl.int64) * k_stride + within_page + offsets, mask=mask, other=0.0)
        v = tl.load(v_head + page.to(tl.int64) * v_stride + within_page + offsets, mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        is_visible = is_stored[None, :]
        if WINDOW > 0:
            is_visible = is_visible & (positions[None, :] >= first_visible)
        scores = tl.where(is_visible, scores, -float("inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - new_maximum[:, None])
        correction = tl.exp2(maximum - new_maximum)
        total = total * correction[:, None] + weights if BY_PLACE else total * correction + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * correction[:, None], input_precision="ieee")
        maximum = new_maximum
        page = next_page
    if BY_PLACE:
        total = tl.sum(total, 1)
    return maximum, total, acc


@triton.jit
def _finish(maximum, total, acc):
    """Normalised output and log-sum-exp; zeros and minus infinity where no key was visible."""
    is_empty = total == 0.0
    divisor = tl.where(is_empty, 1.0, total)
    return acc / divisor[:, None], tl.where(is_empty, -float("inf"), maximum + tl.log2(divisor))


@triton.jit
def prefix_kernel(
    qkv, cos, sin, q_norm, k_cache, v_cache, block_tables, context_lens, items, num_items, partial_outputs,
    partial_lses, qkv_stride, part_stride, k_stride, v_stride, table_stride, scale_log2, eps,
    NUM_PARTS: tl.constexpr, OFFSET: tl.constexpr, DISTANCE: tl.constexpr, NORMS_LAST: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, RATIO: tl.constexpr,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, NUM_QUERIES: tl.constexpr, TILE: tl.constexpr, ROWS_PER_TILE: tl.constexpr,
    NUM_FIELDS: tl.constexpr, IN_ASM: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Attention over shared pages, for several rows at once: one work item and head after the other.

    A query vector of this kernel is one head of one row: query i is head i % RATIO of the item's row
    i // RATIO, so that a page that is read once is multiplied with the queries of all rows of the tile.
    `items` [items, NUM_FIELDS + ROWS_PER_TILE] says which pages and rows (`prefixes.NUM_ITEM_FIELDS`), and
    `num_items` how many are valid. As the number of programs is fixed in a captured graph, a program takes
    every `num_programs`-th pair of item and head. All rows of an item have the same pages there, so the
    block table of its first row serves for all. A finished row's slots are left as they are.
    """
    if OVERLAPS:
        # In this order: the suffix kernel reads `qkv` as soon as it starts.
        gdc_wait()
        gdc_launch_dependents()
    TILES_PER_PAGE: tl.constexpr = PAGE_SIZE // TILE
    dims = tl.arange(0, PADDED_DIM)
    queries = tl.arange(0, NUM_QUERIES)
    members = queries // RATIO
    for work in tl.range(tl.program_id(0), tl.load(num_items) * NUM_KV_HEADS, tl.num_programs(0)):
        kv_head = work % NUM_KV_HEADS
        item = items + (work // NUM_KV_HEADS) * (NUM_FIELDS + ROWS_PER_TILE)
        rows = tl.load(item + NUM_FIELDS + members, mask=members < ROWS_PER_TILE, other=-1)
        contexts = tl.load(context_lens + rows, mask=rows >= 0, other=0)
        is_live = contexts > 0
        heads = kv_head * RATIO + queries % RATIO
        mask = is_live[:, None] & (dims < HEAD_DIM)[None, :]
        q_heads = qkv + rows.to(tl.int64)[:, None] * qkv_stride + heads[:, None] * HEAD_DIM
        first_visible = contexts - WINDOW
        first_tile = tl.load(item) * TILES_PER_PAGE
        if WINDOW > 0:
            # Finished rows and padding rows must not widen the range.
            earliest = tl.min(tl.where(is_live, first_visible, 2147483647), 0)
            first_tile = tl.maximum(first_tile, tl.maximum(earliest, 0) // TILE)
        end_page = tl.load(item + 1)
        end_tile = tl.where(tl.max(contexts, 0) > 0, end_page * TILES_PER_PAGE, first_tile)
        table = block_tables + tl.load(item + NUM_FIELDS) * table_stride
        page = tl.load(table + first_tile // TILES_PER_PAGE, mask=first_tile < end_tile, other=0)
        cosine, sine = _angles(cos, sin, contexts[:, None] - 1, dims[None, :], mask, HEAD_DIM, DISTANCE)
        q = _rotated(
            q_heads, part_stride, dims[None, :], mask, cosine, sine, q_norm, eps, NUM_PARTS, HEAD_DIM, OFFSET,
            DISTANCE, NORMS_LAST, cos.dtype.element_ty,
        )  # fmt: skip
        maximum = tl.full([NUM_QUERIES], _LOWEST, tl.float32)
        total = tl.zeros([NUM_QUERIES], tl.float32)
        acc = tl.zeros([NUM_QUERIES, PADDED_DIM], tl.float32)
        k_head, v_head = k_cache + kv_head * HEAD_BLOCK, v_cache + kv_head * HEAD_BLOCK
        if k_cache.dtype.element_ty == tl.uint8:
            q, scales_log2 = narrowed_queries(q, scale_log2)
            maximum, total, acc = attend_8bit(
                q, maximum, total, acc, k_head, v_head, k_stride, v_stride, table, page, first_tile, end_tile,
                first_visible[:, None], end_page * PAGE_SIZE, scales_log2, HEAD_DIM, PADDED_DIM, PAGE_SIZE,
                TILE, WINDOW, IN_ASM,
            )  # fmt: skip
        else:
            maximum, total, acc = _attend(
                q, maximum, total, acc, k_head, v_head, k_stride, v_stride, table, page, first_tile, end_tile,
                first_visible[:, None], end_page * PAGE_SIZE, scale_log2, HEAD_DIM, PADDED_DIM, PAGE_SIZE,
                TILE, WINDOW,
            )  # fmt: skip
        output, lse = _finish(maximum, total, acc)
        slots = tl.load(item + 2) + members * tl.load(item + 3)
        results = slots.to(tl.int64) * (NUM_KV_HEADS * RATIO) + heads
        tl.store(partial_lses + results, lse, mask=is_live)
        tl.store(partial_outputs + results[:, None] * HEAD_DIM + dims[None, :], output, mask=mask)


@triton.jit
def suffix_kernel(
    qkv, cos, sin, q_norm, k_norm, slots, k_cache, v_cache, block_tables, context_lens, prefix_lens,
    first_slots, num_partials, partial_outputs, partial_lses, out, qkv_stride, part_stride, k_stride,
    v_stride, table_stride, out_stride, num_prefix_slots, scale_log2, eps,
    NUM_PARTS: tl.constexpr, OFFSET: tl.constexpr, DISTANCE: tl.constexpr, NORMS_LAST: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, RATIO: tl.constexpr,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    WINDOW: tl.constexpr, NUM_QUERIES: tl.constexpr, TILE: tl.constexpr, NUM_SPLITS: tl.constexpr,
    HAS_PREFIXES: tl.constexpr, IN_ASM: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Attention of one row and key-value head over one part of the row's own keys, which follow its prefix.

    The program (head, part, row) turns the queries and, in the last part, the new key. Then it has four
    stages:

    1. Store: the new key and value go to the cache at `slots` [B], but into the softmax straight from
       registers: only older positions are read back, so nothing has to wait for the write.
    2. Own keys: positions from `prefix_lens` [B] (or the window's start) to before the new one, in NUM_SPLITS
       parts of whole tiles.
    3. Prefix: with one part, the partial results of the prefix kernel are merged here; with more, the merge
       kernel does it. A partial output is a mean over its keys with the weight 2^lse behind it.
    4. Result: with one part to `out`, with more to the row's slots of the partial results.

    With prefixes the kernel runs beside the prefix kernel, which leaves much of the memory's bandwidth
    unused, and waits for its results only between stages 2 and 3. What stage 1 stores is in no shared page.
    """
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * RATIO
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    context = tl.load(context_lens + row)
    slot = tl.load(slots + row)
    dims = tl.arange(0, PADDED_DIM)[None, :]
    queries = tl.arange(0, NUM_QUERIES)
    heads = kv_head * RATIO + queries
    is_query = queries < RATIO
    mask = is_query[:, None] & (dims < HEAD_DIM)
    head_offsets = heads[:, None] * HEAD_DIM + dims

    begin = 0
    if HAS_PREFIXES:
        begin = tl.load(prefix_lens + row)
        if NUM_SPLITS == 1:  # for stage 3, which would wait for them
            first_slot, num_merged = tl.load(first_slots + row), tl.load(num_partials + row)
    if WINDOW > 0:
        begin = tl.maximum(begin, context - WINDOW)
    first_tile = begin // TILE
    end_tile = tl.cdiv(context - 1, TILE)
    if NUM_SPLITS > 1:
        tiles_per_split = tl.cdiv(tl.maximum(end_tile - first_tile, 0), NUM_SPLITS)
        first_tile += split * tiles_per_split
        end_tile = tl.minimum(first_tile + tiles_per_split, end_tile)
    # Loaded before the rotation, which waits for its operands, so that the first keys' address is known then.
    table = block_tables + row * table_stride
    page = tl.load(table + first_tile // (PAGE_SIZE // TILE), mask=first_tile < end_tile, other=0)

    if OVERLAPS:
        gdc_launch_dependents()
        if not HAS_PREFIXES:
            gdc_wait()
    row_heads = qkv + row * qkv_stride
    q_heads = row_heads + heads[:, None] * HEAD_DIM
    # The one new key and value are copied for each query, in the queries' layout; the first copy is stored.
    copies = tl.zeros([NUM_QUERIES, 1], tl.int32)
    k_heads = row_heads + (NUM_HEADS + kv_head + copies) * HEAD_DIM
    is_new = is_query & (slot >= 0) & (split == NUM_SPLITS - 1)
    new_mask = is_new[:, None] & (dims < HEAD_DIM)
    cosine, sine = _angles(cos, sin, context - 1, dims, mask, HEAD_DIM, DISTANCE)
    q = _rotated(
        q_heads, part_stride, dims, mask, cosine, sine, q_norm, eps, NUM_PARTS, HEAD_DIM, OFFSET,
        DISTANCE, NORMS_LAST, cos.dtype.element_ty,
    )  # fmt: skip
    k = _rotated(
        k_heads, part_stride, dims, new_mask, cosine, sine, k_norm, eps, NUM_PARTS, HEAD_DIM, OFFSET,
        DISTANCE, NORMS_LAST, cos.dtype.element_ty,
    )  # fmt: skip
    v_heads = k_heads + NUM_KV_HEADS * HEAD_DIM
    v = _head_values(v_heads + dims, new_mask, part_stride, NUM_PARTS, cos.dtype.element_ty)
    first_mask = new_mask & (queries == 0)[:, None]
    new_page = (slot // PAGE_SIZE).to(tl.int64)
    in_page = kv_head * HEAD_BLOCK + (slot % PAGE_SIZE + copies) * HEAD_DIM + dims
    if k_cache.dtype.element_ty == tl.uint8:
        q, scales_log2 = narrowed_queries(q, scale_log2)
        k, k_scales = quantized_heads(k)
        v, v_scales = quantized_heads(v)
        behind = kv_head * HEAD_BLOCK + PAGE_SIZE * HEAD_DIM + slot % PAGE_SIZE + tl.zeros_like(queries)
        is_first = is_new & (queries == 0)
        tl.store(k_cache + new_page * k_stride + behind, k_scales.to(tl.uint8), mask=is_first)
        tl.store(v_cache + new_page * v_stride + behind, v_scales.to(tl.uint8), mask=is_first)
    tl.store(k_cache + new_page * k_stride + in_page, k, mask=first_mask)
    tl.store(v_cache + new_page * v_stride + in_page, v, mask=first_mask)

    # The running softmax begins with the new key, whose weight is 1 as long as no other key is there.
    total = is_new.to(tl.float32)
    if k_cache.dtype.element_ty == tl.uint8:
        # What is no number is seen here; among older keys the sequence has NaN behind it already.
        v_exponents = exponents(v_scales) + 0.0 * factors(v_scales)
        score = tl.sum(q.to(tl.float32) * numbers(k), 1) * (scales_log2 * factors(k_scales)) + v_exponents
        total *= tl.exp2(-v_exponents)
        acc = numbers(v)
    else:
        score = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * scale_log2
        acc = v.to(tl.float32)
    maximum = tl.where(is_new, score, _LOWEST)
    k_head, v_head = k_cache + kv_head * HEAD_BLOCK, v_cache + kv_head * HEAD_BLOCK
    if k_cache.dtype.element_ty == tl.uint8:
        maximum, total, acc = attend_8bit(
            q, maximum, total, acc, k_head, v_head, k_stride, v_stride, table, page, first_tile, end_tile,
            context - WINDOW, context - 1, scales_log2, HEAD_DIM, PADDED_DIM, PAGE_SIZE, TILE, WINDOW, IN_ASM,
        )  # fmt: skip
    else:
        maximum, total, acc = _attend(
            q, maximum, total, acc, k_head, v_head, k_stride, v_stride, table, page, first_tile, end_tile,
            context - WINDOW, context - 1, scale_log2, HEAD_DIM, PADDED_DIM, PAGE_SIZE, TILE, WINDOW,
        )  # fmt: skip
    if HAS_PREFIXES:
        if OVERLAPS:
            gdc_wait()
        if NUM_SPLITS == 1:
            # A partial output is the normalised mean over its keys; its weight is the sum behind it, 2^lse.
            result = first_slot.to(tl.int64) * NUM_HEADS
            for _ in range(tl.where(context > 0, num_merged, 0)):
                lse = tl.load(partial_lses + result + heads, mask=is_query, other=-float("inf"))
                output = tl.load(partial_outputs + result * HEAD_DIM + head_offsets, mask=mask, other=0.0)
                new_maximum = tl.maximum(maximum, lse)
                correction = tl.exp2(maximum - new_maximum)
                weight = tl.exp2(lse - new_maximum)
                total = total * correction + weight
                acc = acc * correction[:, None] + output * weight[:, None]
                maximum = new_maximum
                result += NUM_HEADS
    output, lse = _finish(maximum, total, acc)
    if NUM_SPLITS == 1:
        tl.store(out + row * out_stride + head_offsets, output.to(out.dtype.element_ty), mask=mask)
    else:
        result = (num_prefix_slots + row * NUM_SPLITS + split) * NUM_HEADS
        tl.store(partial_lses + result + heads, lse, mask=is_query)
        tl.store(partial_outputs + result * HEAD_DIM + head_offsets, output, mask=mask)


@triton.jit
def _weigh(partial_outputs, partial_lses, slots, is_used, NUM_HEADS, HEAD_DIM, PADDED_DIM: tl.constexpr):
    """One head's partial outputs [slots, D] and their log-sum-exps [slots], minus infinity where not used."""
    dims = tl.arange(0, PADDED_DIM)
    results = slots.to(tl.int64) * NUM_HEADS + tl.program_id(0)
    lses = tl.load(partial_lses + results, mask=is_used, other=-float("inf"))
    mask = is_used[:, None] & (dims < HEAD_DIM)[None, :]
    outputs = tl.load(partial_outputs + results[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    return outputs, lses


@triton.jit
def merge_kernel(
    context_lens, first_slots, num_partials, partial_outputs, partial_lses, out, out_stride, num_prefix_slots,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, NUM_SPLITS: tl.constexpr,
    MAX_PREFIX_PARTIALS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """The output of one row and head: the mean of all its partial outputs, weighted with 2^lse of each."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(1).to(tl.int64)
    splits = tl.arange(0, NUM_SPLITS)
    outputs, lses = _weigh(
        partial_outputs,
        partial_lses,
        num_prefix_slots + row * NUM_SPLITS + splits,
        splits >= 0,
        NUM_HEADS,
        HEAD_DIM,
        PADDED_DIM,
    )
    maximum = tl.maximum(tl.max(lses, 0), _LOWEST)
    if MAX_PREFIX_PARTIALS > 0:
        pieces = tl.arange(0, MAX_PREFIX_PARTIALS)
        # The prefix kernel left a finished row's slots as they were.
        is_used = (pieces < tl.load(num_partials + row)) & (tl.load(context_lens + row) > 0)
        prefix_outputs, prefix_lses = _weigh(
            partial_outputs,
            partial_lses,
            tl.load(first_slots + row) + pieces,
            is_used,
            NUM_HEADS,
            HEAD_DIM,
            PADDED_DIM,
        )
        maximum = tl.maximum(maximum, tl.max(prefix_lses, 0))
        prefix_weights = tl.exp2(prefix_lses - maximum)
    weights = tl.exp2(lses - maximum)
    total = tl.sum(weights, 0)
    output = tl.sum(outputs * weights[:, None], 0)
    if MAX_PREFIX_PARTIALS > 0:
        total += tl.sum(prefix_weights, 0)
        output += tl.sum(prefix_outputs * prefix_weights[:, None], 0)
    output = output / tl.where(total == 0.0, 1.0, total)
    dims = tl.arange(0, PADDED_DIM)
    offsets = row * out_stride + tl.program_id(0) * HEAD_DIM + dims
    tl.store(out + offsets, output.to(out.dtype.element_ty), mask=dims < HEAD_DIM)
