/* Strobe: exact attention, forward and backward, in O(seqlen) memory. C ABI.
 *
 *     strobe_problem p;                          describe what you want
 *     strobe_problem_init(&p, sizeof p);
 *     p.dtype = STROBE_BFLOAT16; p.batch = 1; p.seqlen_q = p.seqlen_k = 4096; ...
 *     strobe_plan plan;                          ask how it will be done
 *     plan.struct_size = sizeof plan;
 *     strobe_plan_make(&p, &plan);
 *     strobe_forward(&plan, &args);              do it, as often as you like
 *
 * Conventions
 *  - No function prints, aborts, exits or throws. Each returns a status; strobe_last_error() has
 * the text of the calling thread's latest failure, which names the argument, what was got and what
 * was wanted.
 *  - Bad input is refused before anything is written.
 *  - A pointer to what the problem does not ask for must be NULL, such as k_new without append and
 *    seqused_k without has_seqused_k. Else the launch is refused.
 *  - Shapes are written [batch, seqlen_q, heads, head_dim]; strides are elements, in that order.
 *  - lse is the natural logarithm of the sum of exponentials of the scores of a row, float32; that
 *    of an attention sink is one of them, unless sinks_outside_lse.
 *  - All functions are thread-safe and re-entrant. A plan is plain data: copy it, share it.
 *
 * Algorithm: T. Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work
 * Partitioning", arXiv:2307.08691, algorithms 1 (forward) and 2 (backward).
 */
#ifndef STROBE_STROBE_H_
#define STROBE_STROBE_H_

#include <stddef.h>
#include <stdint.h>

/* First number of this header's version; strobe_version() has that of the library at work. */
#define STROBE_VERSION_MAJOR 0
/* Second number of this header's version. */
#define STROBE_VERSION_MINOR 2
/* Third number of this header's version. */
#define STROBE_VERSION_PATCH 0

#if defined(_WIN32)
#define STROBE_API
#else
#define STROBE_API __attribute__((visibility("default")))
#endif

#if defined(__cplusplus) && __cplusplus >= 201103L
#define STROBE_NOEXCEPT noexcept
#elif defined(__cplusplus)
#define STROBE_NOEXCEPT throw()
#else
#define STROBE_NOEXCEPT
#endif
#ifdef __cplusplus
extern "C" {
#endif

/* What a function answers. */
typedef enum strobe_status {
  STROBE_OK = 0,               /* done */
  STROBE_INVALID_ARGUMENT = 1, /* the request contradicts itself or breaks a documented rule */
  STROBE_UNSUPPORTED =
      2, /* well-formed, but no kernel takes it: strobe_why() lists each one's reason */
  STROBE_OUT_OF_MEMORY = 3,  /* the library's own workspace could not be allocated */
  STROBE_DEVICE_ERROR = 4,   /* the device or its driver reported a failure */
  STROBE_INTERNAL_ERROR = 5, /* a fault in Strobe: please report it */
  STROBE_INTERRUPTED = 6     /* stopped by args.interrupt: the outputs are incomplete */
} strobe_status;

/* What the elements of tensors are. */
typedef enum strobe_dtype {
  STROBE_FLOAT32 = 0,     /* IEEE binary32 */
  STROBE_BFLOAT16 = 1,    /* the upper half of a float32 */
  STROBE_FLOAT16 = 2,     /* IEEE binary16 */
  STROBE_FLOAT8_E4M3 = 3, /* 1 sign, 4 exponent and 3 mantissa bits, no infinity (OCP E4M3): of a
                             forward problem (see has_q_scale), or of a cache's keys and values */
  STROBE_FLOAT8_E5M2 = 4, /* the upper half of an fp16: of k and v where q is e4m3, or of a cache's
                             keys and values (on CPUs) */
  STROBE_INT8 = 5,        /* of a cache's keys and values alone (kv_dtype), with scales */
  STROBE_Q8_0 = 6, /* of a cache's keys and values alone; head_dim is a multiple of 32: rows of
                      blocks of 32 values, with no gaps: an fp16 scale and 32 codes of int8 */
  STROBE_Q4_0 = 7  /* the same with 16 bytes behind the scale: byte n has the code of value n in
                      its lower four bits, of value n + 16 in its upper ones. A code less 8 is
                      what the scale multiplies */
} strobe_dtype;
#define STROBE_SAME_DTYPE (-1) /* the problem's: default of all its other fields of a dtype */
/* A window_left or window_right that is no limit, whatever window_signed says. */
#define STROBE_NO_LIMIT INT64_MAX

/* Where the tensors are and the work is done. */
typedef enum strobe_device {
  STROBE_CPU = 0, /* pointers into the host's memory */
  STROBE_CUDA = 1 /* pointers into the memory of an NVIDIA GPU */
} strobe_device;

/* Which pass. */
typedef enum strobe_direction {
  STROBE_FORWARD = 0, /* out and lse from q, k and v */
  STROBE_BACKWARD = 1 /* dq, dk and dv from these, out, lse and dout */
} strobe_direction;

/* Which ALiBi slopes the launch arguments carry. */
typedef enum strobe_alibi {
  STROBE_ALIBI_NONE = 0,          /* no ALiBi */
  STROBE_ALIBI_PER_HEAD = 1,      /* slopes [heads] */
  STROBE_ALIBI_PER_BATCH_HEAD = 2 /* slopes [batch, heads] */
} strobe_alibi;

/* Where the keys and values of a forward problem are. */
typedef enum strobe_cache {
  STROBE_CACHE_NONE = 0,       /* in tensors of the batch's own */
  STROBE_CACHE_CONTIGUOUS = 1, /* in a cache [cache_batch, seqlen_k, heads_kv, head_dim] */
  STROBE_CACHE_PAGED = 2 /* in pages [pages, page_size, heads_kv, head_dim], found by block_table */
} strobe_cache;

/* New keys and values that a launch writes to the cache before it attends to them. */
typedef enum strobe_append {
  STROBE_APPEND_NONE = 0,  /* the cache stays as it is */
  STROBE_APPEND_DENSE = 1, /* [batch, seqlen_new, heads_kv, head_dim] */
  STROBE_APPEND_PACKED = 2 /* [total_new, heads_kv, head_dim], found by cu_seqlens_k_new */
} strobe_append;

/* The scales of keys and values of int8 or float8, by which codes are multiplied. */
typedef enum strobe_kv_scale {
  STROBE_KV_SCALE_NONE = 0,   /* keys and values have none, or have them in their blocks */
  STROBE_KV_SCALE_TENSOR = 1, /* one for all keys, one for all values */
  STROBE_KV_SCALE_HEAD = 2,   /* [heads_kv] */
  STROBE_KV_SCALE_ROW = 3, /* of each row of each head: [.., rows, heads_kv] as k and v have them;
                              written with append */
  STROBE_KV_SCALE_BATCH_HEAD = 4 /* float32 [batch, heads_kv], of a sequence's heads: where q is
                                    float8 too, and of strobe_quantize */
} strobe_kv_scale;

/* Strides of one tensor in elements: batch, seqlen, heads, head_dim. The last must be 1.
 * All zero means contiguous in that order. With varlen the batch stride is not used: tensors are
 * [total, heads, head_dim]. Inputs may have stride 0 in a dimension (broadcast). An output (out,
 * lse, dq, dk, dv, dbias, the workspace, a cache that is appended to) must have no byte in common
 * with another argument: such a launch is refused. Elements may be interleaved, as those of dq, dk
 * and dv in one tensor of gradients. */
typedef struct strobe_strides {
  int64_t batch, seqlen, head, dim; /* elements from one index of that dimension to the next */
} strobe_strides;

/* A mask as data: which kinds there are. */
typedef enum strobe_mask_kind {
  STROBE_MASK_NONE = 0,  /* none: the rule of the problem alone says who sees what */
  STROBE_MASK_PACKED = 1 /* the arguments carry what strobe_mask_pack wrote */
} strobe_mask_kind;

/* A mask as data, which any mask can be put into that somebody can compute. It says which blocks of
 * block_q queries x block_k keys hold a pair that is seen, and which pairs of those blocks that are
 * seen in part. Block n of a sequence has its rows from n times the block's size on. Keys are
 * numbered within their sequence, from 0; with a cache, from the first one that the sequence has.
 *
 * A pair is seen if all allow it: causality, window, chunk and prefix, the lengths, and the mask.
 *
 * Memory is bounded by two capacities, which are the caller's: the mask holds at most capacity
 * entries, which are a block of keys that a block of queries sees, and bits for at most
 * partial_capacity of them. All blocks of queries share these; room is given in the order of their
 * numbers, each being counted whether it gets any or not. The rows of out, lse and dq of a block
 * of queries that there is no room for are NaN, and dk and dv have nothing of it. strobe_mask_bytes
 * says what that takes. */
typedef struct strobe_mask {
  int32_t kind;     /* strobe_mask_kind */
  int32_t reserved; /* 0 */
  int32_t block_q;  /* 64, 128 or 256 */
  int32_t block_k;  /* 64, 128 or 256 */
  int64_t batch;    /* 1: one mask for all sequences; or the problem's batch, as with varlen */
  int64_t heads;    /* 1: one mask for all query heads; or the problem's heads */
  int64_t capacity; /* 0 (default): all blocks of keys that there may be, for each of queries */
  int64_t partial_capacity; /* 0 (default): as capacity */
} strobe_mask;

/* What the caller wants. Plain data; fill with strobe_problem_init first, then set what differs. */
typedef struct strobe_problem {
  size_t
      struct_size; /* sizeof(strobe_problem) of the caller's header: set by strobe_problem_init */

  int32_t direction;    /* strobe_direction */
  int32_t dtype;        /* strobe_dtype of q, k, v, out and their gradients (kv_dtype, out_dtype and
                           grad_dtype say where another is meant); sums are float32. float8 e4m3:
                           see has_q_scale */
  int32_t device;       /* strobe_device */
  int32_t device_index; /* CUDA: which GPU, as cudaSetDevice counts them. CPU: 0 */

  int64_t batch;      /* >= 1 */
  int64_t seqlen_q;   /* with varlen: the longest query sequence (an upper bound will do) */
  int64_t seqlen_k;   /* with varlen: the longest key sequence (an upper bound will do) */
  int64_t heads;      /* query heads */
  int64_t heads_kv;   /* key and value heads; divides heads. 0 (default): as many as heads */
  int64_t head_dim;   /* of q and k, 1 to 256 */
  int64_t head_dim_v; /* of v and out, 1 to 256. 0 (default): head_dim */

  int32_t varlen;  /* 1: sequences are packed end to end and the arguments carry cu_seqlens_q and
                      cu_seqlens_k */
  int32_t causal;  /* 1: query i sees keys up to i + seqlen_k - seqlen_q (bottom-right aligned) */
  int64_t total_q; /* varlen: rows of q, all sequences together, and rows past their end */
  int64_t total_k; /* varlen: rows of k and v, all sequences together */

  /* Sliding window: query i sees keys in [i + seqlen_k - seqlen_q - window_left, i + seqlen_k -
   * seqlen_q + window_right]. -1 and STROBE_NO_LIMIT: no limit. causal and window combine: causal
   * makes window_right 0 at most. With window_signed, -1 and other negative numbers are limits. */
  int64_t window_left, window_right;

  float scale;   /* multiplies q.k; NaN (default): 1 / sqrt(head_dim) */
  float softcap; /* c > 0: the scaled score s becomes c * tanh(s / c), before ALiBi and the mask; 0:
                    off */
  float dropout_p; /* probability in [0, 1) of dropping a weight; kept ones scale by 1 / (1 - p) */
  int32_t alibi;   /* strobe_alibi; adds -slope * |i + seqlen_k - seqlen_q - j| to the score */

  int32_t deterministic; /* backward: the same bits for every thread count (they always repeat at a
                            fixed one) */
  int32_t has_dlse;      /* backward: the arguments carry dlse, a gradient of lse */
  int32_t threads; /* CPU threads to use at most. 0 (default): OpenMP's number (OMP_NUM_THREADS) */
  /* 1: the bits of a row of out and lse depend on its query, and on the keys that it sees and their
   * numbers, and not on what it is computed with: other queries, other sequences, whole tensors or
   * a cache, threads (docs/semantics.md has the exceptions). Backward, with deterministic too: a
   * sequence's bits do not depend on the others of the batch, for finite tensors laid out alike.
   * 0 (default): kernels may be chosen by the size of the whole. */
  int32_t batch_invariant;

  strobe_strides q, k, v, out;     /* strides of the tensor of that name, both directions */
  strobe_strides dout, dq, dk, dv; /* strides of the tensor of that name, backward */

  /* c > 0: a query sees only keys of its own chunk, which are the c key positions from a multiple
   * of c on; with causal and the window. 0: off */
  int64_t attention_chunk;

  /* 1: the arguments carry the array of that name, int32 [batch], on the problem's device. */
  int32_t has_seqused_q, has_seqused_k, has_q_position, has_prefix;

  int32_t kv_dtype;  /* strobe_dtype of k and v (v_dtype says where v has another).
                        STROBE_SAME_DTYPE (default): dtype. With a cache also int8, float8, q8_0 or
                        q4_0: see kv_scale. Beside float8 queries e4m3 or e5m2. Any other is
                        answered with STROBE_UNSUPPORTED */
  int32_t out_dtype; /* strobe_dtype of out: STROBE_SAME_DTYPE (default), dtype, or STROBE_FLOAT32.
                        A backward pass reads what a forward pass wrote so. Of float8 queries bf16
                        (default), fp16 or fp32 */

  /* Keys and values in a cache: forward only, without dropout. With a cache
   *  - a sequence's keys are rows of the cache from 0 (with has_leftpad from leftpad) up to its
   *    length, which is seqused_k (without has_seqused_k: seqlen_k) plus what is appended. They are
   *    numbered from 0 at the first of them: masks, positions and ALiBi count from there;
   *  - seqlen_k is the most rows that a sequence may reach, appended ones included: contiguous, the
   *    rows of an entry; paged, at most pages_per_sequence * page_size;
   *  - varlen packs the queries alone: cu_seqlens_q, total_q. total_k is not used, and
   *    cu_seqlens_k is NULL;
   *  - the strides of k and v have the cache's extents: contiguous, k.batch leads from an entry to
   *    the next; paged, from a page to the next and k.seqlen from a row of a page to the next. Any
   *    strides will do (a pool that interleaves K and V, heads before rows); all zero: contiguous.
   *    With append, k and v are outputs too: no two rows may overlap;
   *  - the plan depends on no length, index or page: a CUDA graph can replay a launch with others.
   */
  int32_t cache;              /* strobe_cache */
  int32_t append;             /* strobe_append; needs has_seqused_k */
  int64_t cache_batch;        /* contiguous: entries of the cache, >= 1. 0 (default): batch */
  int64_t pages;              /* paged: pages of the pool, >= 0 */
  int64_t page_size;          /* paged: rows of a page, >= 1 */
  int64_t pages_per_sequence; /* paged: columns of block_table */
  int64_t block_table_stride; /* paged: int32s from a row of block_table to the next, at least
                                 pages_per_sequence. 0 (default): pages_per_sequence */
  int64_t seqlen_new; /* append: rows that each sequence gets; 0: none, and k_new and v_new are
                         NULL. Packed: of the longest (an upper bound will do) */
  int64_t total_new;  /* append packed: rows of k_new and v_new, all sequences together */
  strobe_strides k_new, v_new; /* strides of the tensor of that name; append packed: the batch
                                  stride is not used */

  /* Rotary embedding of the queries and of the appended keys, with a cache alone. The first
   * rotary_dim elements of each are rotated in pairs by the angles that rotary_cos and rotary_sin
   * have for its position: the elements n and n + rotary_dim / 2, or with rotary_interleaved 2n and
   * 2n + 1. The new key i of a sequence is at the position start + i, where start is the number of
   * its keys before the append, or rotary_position. Query i is at start + i when the problem is
   * causal or has a window or chunks; without any of these all queries are at start. */
  int64_t rotary_dim;         /* even, at most head_dim. 0 (default): none */
  int64_t rotary_rows;        /* positions that rotary_cos and rotary_sin have */
  int32_t rotary_interleaved; /* 0 or 1 */

  /* 1: the arguments carry the array of that name, int32 [batch]. With a cache alone. */
  int32_t has_cache_batch_idx; /* contiguous: the entry of the cache that a sequence has; without it
                                  sequence b has entry b, and cache_batch is at least batch */
  int32_t has_leftpad;         /* rows at the begin of the cache that a sequence skips */
  int32_t has_rotary_position; /* with rotary_dim: position of the first query and new key */

  /* 1: window_left and window_right are limits of either sign, and STROBE_NO_LIMIT alone is none. A
   * negative limit ends the window on the other side of the query's own position: left 8 and right
   * -3 are the keys from 8 to 3 positions before it. Together they are at least 0 (with causal,
   * where window_right is 0 at most, too), and neither is negative with attention_chunk.
   * 0 (default): -1 is no limit, and no other negative number is taken. */
  int64_t window_signed;

  /* Backward alone. */
  int32_t grad_dtype; /* strobe_dtype of dq, dk and dv: STROBE_SAME_DTYPE (default), dtype, or
                         STROBE_FLOAT32, which gets the float32 sums as they are. dout has dtype */
  int32_t accumulate; /* 1: the gradients are added to what dq, dk and dv hold, in float32, and the
                         sum is rounded once where they are narrower; a row whose gradient is 0 by
                         rule (not in use, or past the last sequence) stays as it is. 0 (default):
                         dq, dk and dv are written, whatever they hold */
  int64_t has_delta;  /* 1: the arguments carry delta, and out is not read. Not with has_dlse */

  /* Attention sinks: 1: the arguments carry sinks, one logit for each query head. It takes part in
   * the softmax of each of the head's rows as the score of one more key, whose value is 0: its
   * exponential is in the sum that weights are divided by. It is neither scaled nor capped. */
  int32_t has_sinks;
  /* 1: lse is that of the keys alone. The backward is then given such an lse, and adds the sink
   * itself. 0 (default): the sink is in lse */
  int32_t sinks_outside_lse;
  int64_t has_dsinks; /* backward, 1: the arguments carry dsinks. With has_sinks */

  strobe_mask mask; /* a mask as data, with everything above */

  /* Additive bias: with has_bias, bias[b][h][i][j] is added to the score of query i and key j of
   * sequence b in query head h, after scale and softcap and beside ALiBi. i and j count within the
   * sequence, packed or not; with a cache j counts the sequence's keys, from 0 after its left pad.
   *  - bias is [bias_batch, bias_heads, bias_seqlen_q, seqlen_k]; the first three are 1 (shared by
   *    all) or what batch, heads and seqlen_q are. With varlen seqlen_q and seqlen_k are then
   *    extents of memory, and no upper bounds only;
   *  - a value of -inf hides the pair as the mask does: whatever q, k and v hold, it counts for
   *    nothing, and a row all of whose pairs are hidden sees no key. +inf and NaN make the scores
   *    what adding them makes them, and so the row NaN. What stands at a pair that the mask hides
   *    is not looked at;
   *  - dbias, with has_dbias in the backward, is the gradient of bias in bias's shape: every
   *    element is written (accumulate does not concern it), 0 where no pair is seen. Along an axis
   *    that bias has once it is a sum, made in float32 in the order of the indices: the same bits
   *    for every number of threads. */
  int32_t has_bias;      /* 1: the arguments carry bias */
  int32_t has_dbias;     /* 1: backward; the arguments carry dbias. With has_bias */
  int32_t bias_dtype;    /* strobe_dtype of bias, fp32, bf16 or fp16. STROBE_SAME_DTYPE (default):
                            dtype */
  int32_t dbias_dtype;   /* strobe_dtype of dbias: STROBE_SAME_DTYPE (default), bias_dtype, or
                            STROBE_FLOAT32, which gets the sums as they are */
  int64_t bias_batch;    /* 1 or batch. 0 (default): batch */
  int64_t bias_heads;    /* 1 or heads. 0 (default): heads */
  int64_t bias_seqlen_q; /* 1 or seqlen_q. 0 (default): seqlen_q */
  /* Elements from one sequence (batch), query head (head), query (seqlen) and key (dim) to the
   * next: any number for bias, 0 and negative ones too; dbias must not overlap itself. All zero:
   * contiguous in the order of the shape above. */
  strobe_strides bias, dbias;

  /* Quantised keys and values: kv_dtype int8, float8, q8_0 or q4_0, in a cache alone. A value
   * is its code times its scale; a scale that is not finite makes its values NaN. q, k_new, v_new
   * and out stay floats (beside float8 queries: see has_q_scale). Strides of k and v count bytes
   * then, and a row of q8_0 or q4_0 is head_dim / 32 blocks. No address or stride of k and v need
   * be a multiple of anything.
   *
   * An append quantises what it writes, keys after their rotation, and the queries of the same
   * launch see the new rows as the cache has them. int8: rounded to the nearest code, ties to even,
   * -127 to 127; float8: to the nearest, the largest (448; e5m2: 57344) where that is passed. With
   * STROBE_KV_SCALE_ROW the append makes the scales: a row's largest magnitude over 127, or over
   * the largest float8. Blocks have theirs made so
   * too; q4_0: the value of largest magnitude over -8. Other scales are read. A NaN or infinity
   * makes a scale that is not finite, and so all of its values NaN. */
  int32_t kv_scale;       /* strobe_kv_scale: int8 and float8 need one, others have none (float8
                             queries: see has_q_scale). Where one of k and v alone needs one, it is
                             that one's, and the other has no scales */
  int32_t kv_scale_dtype; /* strobe_dtype of k_scale and v_scale: STROBE_FLOAT32 (default) or
                             STROBE_FLOAT16 */
  /* Elements from an entry of the cache, or a page, to the next (batch), from a row (seqlen) and a
   * head to the next; dim is not used. An axis that shares its scales has 0. All zero: contiguous
   * in the order of the shape. */
  strobe_strides k_scale, v_scale;

  /* Where this problem lies in a larger one, of which it has a part of the queries, keys, heads or
   * sequences: dropout then drops of its weights what it would drop of them there, as a sequence
   * that is split over devices needs. With dropout_p > 0 alone. 0 (default): it begins where the
   * larger one does. */
  int64_t dropout_first_query; /* of the larger one: query 0 of each sequence here; below 2^31 */
  int64_t dropout_first_key;   /* of the larger one: key 0 of each sequence here; below 2^31. On
                                  GPUs a multiple of 8 */
  int64_t dropout_first_head;  /* of the larger one: head 0 of sequence 0 here, counted through all
                                  sequences: sequence * dropout_heads + head */
  int64_t dropout_heads;       /* heads of the larger one. 0 (default): heads */

  /* Float8 attention: dtype float8 e4m3, forward alone, without rotary_dim. q is e4m3, k and v are
   * e4m3 or e5m2 (kv_dtype; one for both), in tensors or in a cache; out is bf16
   * (STROBE_SAME_DTYPE), fp16 or fp32. A value is its code times the scale of its sequence and key
   * head: those of q are shared by the query heads of a group. kv_scale is then
   * STROBE_KV_SCALE_BATCH_HEAD or STROBE_KV_SCALE_NONE, by which the scales of keys and values are
   * 1. Scales are float32; one that is not finite makes what it multiplies NaN. Any address and
   * stride will do. bias_dtype's default is that of out. k_new and v_new are codes of kv_dtype: an
   * append copies their bytes, whatever they are, and the scales of the sequence, which it reads
   * and never writes, are theirs too. */
  int64_t has_q_scale; /* 1: the arguments carry q_scale. 0 (default): the scales of q are 1 */
  /* Elements from a sequence (batch) and a key head (head) to the next, 0 along an axis that shares
   * its scales; seqlen is 0. All zero: contiguous (one for all: dim is 1). k_scale and v_scale
   * likewise. */
  strobe_strides q_scale;

  /* strobe_dtype of v, in a cache alone: STROBE_SAME_DTYPE (default), that of k, or whatever
   * kv_dtype may be there (dtype, int8, float8, q8_0 or q4_0): keys of q8_0 with values of q4_0,
   * codes of one and floats of the other. Each of the two is then stored, read and appended to as
   * its own dtype says: strides count its elements, and head_dim of k and head_dim_v of v are
   * multiples of 32 where they are made of blocks. Beside float8 queries k and v have one. */
  int64_t v_dtype;
} strobe_problem;

/* Who chose among the ways in which a problem can be computed. */
typedef enum strobe_chosen_by {
  STROBE_CHOSEN_BY_RULES = 0,  /* the library's rules */
  STROBE_CHOSEN_BY_CALLER = 1, /* strobe_plan_make_chosen */
  STROBE_CHOSEN_BY_TUNING =
      2 /* a table of what was measured on this machine (strobe_tuning_load) */
} strobe_chosen_by;

/* How it will be done: a pure function of the problem, the machine and
 * the table of tuning in force. Plain data, to be read but
 * not written. */
typedef struct strobe_plan {
  size_t
      struct_size; /* sizeof(strobe_plan) of the caller's header: set it before strobe_plan_make */
  strobe_problem problem;   /* with every default resolved */
  const char* kernel;       /* name of the kernel, e.g. "cpu_avx512"; static storage */
  size_t workspace_bytes;   /* what a launch needs; 64-byte alignment */
  int32_t kernel_index;     /* row of the kernel table, for strobe_kernel_name */
  int32_t threads;          /* CPU: threads that the launch will use */
  int64_t tile_q, tile_k;   /* queries and keys of one score tile */
  int64_t block_q, block_k; /* queries (forward) or keys (backward) that one work item owns; 0: not
                               split that way */
  int64_t work_items;       /* independent pieces of work */
  int32_t grid[3];          /* CUDA: thread blocks */
  int32_t block_threads;    /* CUDA: threads of a block */
  int64_t shared_bytes;     /* CUDA: dynamic shared memory of a block */
  /* CUDA: the compiled kernel (instance) that a launch runs. Numbers are those of the library's own
   * table, from 1; 0: none. Which of them a launch takes depends on addresses alone. */
  const char* instance_name;    /* its name, in static storage; CPU: NULL */
  int32_t instance;             /* its number, where all addresses are multiples of 16 bytes */
  int32_t instance_unaligned;   /* where one is not */
  int32_t instance_few_queries; /* with a cache: of the sequences that have few queries, where the
                                   first one is of those that have many */
  int32_t
      instance_few_queries_unaligned; /* where an address of k_new or v_new is no such multiple */
  int64_t chosen_by;                  /* strobe_chosen_by: who made the choice */
  /* CUDA: 1 where a quantised cache is unpacked to the workspace before the kernel attends, so that
   * what codes stand for is rounded to the dtype of q (float8 queries: to bf16); else 0 */
  int32_t unpacks_first;
  int32_t reserved[3]; /* of the library's own; 0 */
} strobe_plan;

/* What may be chosen of how a problem is computed, where several ways give its result. Names are in
 * static storage where the library gives them. */
typedef struct strobe_choice {
  size_t struct_size;   /* sizeof(strobe_choice) of the caller's header */
  const char* kernel;   /* row of the kernel table: "cpu_avx512" */
  const char* instance; /* CUDA: the compiled kernel, as plan.instance_name has it. CPU: NULL */
  int64_t block;        /* CPU: what plan.block_q (forward) or plan.block_k (backward) is at most, a
                           multiple of the tile, or its half or quarter (forward, where a kernel
                           divides tiles); 0 where items are of keys (few queries). CUDA: 0 */
} strobe_choice;

/* Tensors of a forward launch. Pointers may be NULL only where a comment says so or the tensor has
 * no elements. */
typedef struct strobe_forward_args {
  size_t struct_size; /* sizeof(strobe_forward_args) of the caller's header */
  const void* q;      /* [batch, seqlen_q, heads, head_dim], or [total_q, heads, head_dim] */
  const void* k;      /* [batch, seqlen_k, heads_kv, head_dim], or [total_k, ...] */
  const void* v;      /* [batch, seqlen_k, heads_kv, head_dim_v], or [total_k, ...] */
  void* out;          /* [batch, seqlen_q, heads, head_dim_v], or [total_q, ...] */
  float* lse; /* [batch, heads, seqlen_q], or [heads, total_q]; contiguous. NULL: not wanted */
  /* varlen: [batch + 1], from 0 to at most total_q, not decreasing. Rows past the last are no
   * sequence's: what they hold counts for nothing, their out is 0, their lse -inf, their gradients
   * are 0. */
  const int32_t* cu_seqlens_q;
  const int32_t* cu_seqlens_k;           /* varlen: [batch + 1] */
  const float* alibi_slopes;             /* [heads] or [batch, heads], when the problem has ALiBi */
  uint64_t dropout_seed, dropout_offset; /* of the Philox generator, when dropout_p > 0 */
  void* workspace; /* at least workspace_bytes, 64-byte aligned. NULL: the library allocates its own
                    */
  size_t workspace_bytes; /* of workspace, at least the plan's; not read where workspace is NULL */
  void* stream;           /* CUDA: cudaStream_t */
  /* CPU: asked by the calling thread about every 0.1 s, between two work items (a short launch
   * never asks). When it returns other than 0, no further item is begun and the launch returns
   * STROBE_INTERRUPTED. It must not throw. NULL: not wanted. CUDA: not used. A caller whose struct
   * ends before this (struct_size) is served too. */
  int32_t (*interrupt)(void* interrupt_data);
  void* interrupt_data; /* what interrupt is called with */
  /* Of those sequences' rows that the tensors hold, the first so many are in use, when the problem
   * has_seqused_q, has_seqused_k. What follows is never read (it may hold NaN): its out is 0, its
   * lse -inf, its gradients are 0. Causal masks and windows align the last query in use with the
   * last key in use. */
  const int32_t* seqused_q; /* [batch] 0 to the rows of q that the sequence has */
  const int32_t* seqused_k; /* [batch] 0 to the rows of k that the sequence has, before an append */
  /* Key position of each sequence's first query, when the problem has_q_position; without it
   * seqlen_k - seqlen_q of the rows in use. -2^30 to 2^30. */
  const int32_t* q_position; /* [batch] */
  /* Keys at the begin of each sequence that all of its queries see, whatever causal says
   * (prefix-LM), when the problem has_prefix: 0 to seqlen_k. Not with window_left or
   * attention_chunk. */
  const int32_t* prefix; /* [batch] */

  /* With a cache, k and v are the cache: strobe_problem has their shapes. Rows outside a sequence's
   * keys are never read, whatever they hold. With append, rows k_new and v_new are written to k and
   * v, the keys rotated, where each sequence ends; no other byte of the cache is written. Where two
   * sequences append to one row, each of its elements comes from one of them; a sequence that sees
   * a row which another one appends in the same launch may see it before or after.
   *
   * No number below leads out of a cache, table or tensor. On the CPU a launch with a number out of
   * its range is refused before anything is written. On the GPU nothing is written for a sequence
   * whose numbers are out of range, and its rows of out and lse are NaN; a page that is out of
   * range is neither read nor written, and the queries that see a key of it get NaN. Columns of
   * block_table in which a sequence has no key are not looked at. */
  const int32_t* block_table;     /* paged: [batch, pages_per_sequence], 0 to pages - 1 where a
                                     sequence has keys; row n of a sequence is row n % page_size of
                                     the page at column n / page_size. Pages may repeat */
  const int32_t* cache_batch_idx; /* [batch] 0 to cache_batch - 1 */
  const int32_t* leftpad;         /* [batch] 0 to seqused_k */
  const void* k_new; /* append: [batch, seqlen_new, heads_kv, head_dim], or [total_new, ...], of
                        dtype; beside float8 queries of kv_dtype */
  const void* v_new; /* append: [batch, seqlen_new, heads_kv, head_dim_v], or [total_new, ...] */
  const int32_t* cu_seqlens_k_new; /* append packed: [batch + 1], from 0 to total_new, not
                                      decreasing. seqused_k plus a sequence's new rows is at most
                                      seqlen_k */
  const void* rotary_cos; /* rotary_dim > 0: [rotary_rows, rotary_dim / 2], contiguous, dtype */
  const void* rotary_sin; /* as rotary_cos */
  const int32_t* rotary_position; /* [batch]; every position in use is 0 to rotary_rows - 1 */
  /* [heads], when the problem has_sinks. -infinity: the head has none. +infinity: the sink has all
   * weight; out is 0, lse +infinity. NaN: the head's rows that see a key are NaN. */
  const float* sinks;

  /* What strobe_mask_pack wrote for a problem of these lengths and this mask, when the problem has
   * one. Nobody may write to it while the launch runs. On the CPU a launch with anything else is
   * refused; on the GPU its results are of no use, but nothing outside is read or written. */
  const void* mask; /* strobe_mask_bytes, 16-byte aligned */
  const void* bias; /* [bias_batch, bias_heads, bias_seqlen_q, seqlen_k], when it has_bias */
  /* When the problem has a kv_scale: what keys are multiplied by. An output too, as k is, where an
   * append makes it. */
  const void* k_scale;
  const void* v_scale;  /* the same of values */
  const float* q_scale; /* [batch, heads_kv], when the problem has_q_scale */
} strobe_forward_args;

/* Tensors of a backward launch. Outputs are dq, dk and dv, with accumulate inputs too, and dbias.
 */
typedef struct strobe_backward_args {
  size_t struct_size;    /* sizeof(strobe_backward_args) of the caller's header */
  const void *q, *k, *v; /* as in forward */
  const void* out;       /* what forward gave. NULL where the problem has_delta */
  const float* lse;      /* what forward gave */
  const void* dout;      /* gradient of out, its shape */
  const float* dlse;     /* gradient of lse, its shape, contiguous, when the problem has_dlse */

  void* dq; /* [batch, seqlen_q, heads, head_dim], or [total_q, ...] */
  void* dk; /* [batch, seqlen_k, heads_kv, head_dim], or [total_k, ...]: summed over the group */
  void* dv; /* [batch, seqlen_k, heads_kv, head_dim_v], or [total_k, ...] */
  const int32_t *cu_seqlens_q, *cu_seqlens_k;                 /* as in forward */
  const float* alibi_slopes;                                  /* as in forward */
  uint64_t dropout_seed, dropout_offset;                      /* those of the forward launch */
  void* workspace;                                            /* as in forward */
  size_t workspace_bytes;                                     /* as in forward */
  void* stream;                                               /* as in forward */
  int32_t (*interrupt)(void* interrupt_data);                 /* as in forward */
  void* interrupt_data;                                       /* as in forward */
  const int32_t *seqused_q, *seqused_k, *q_position, *prefix; /* as in forward */
  /* The sum over head_dim_v of dout * out, minus the gradient of lse where there is one: lse's
   * shape, contiguous, when the problem has_delta. For callers that have computed it already, as
   * those have that give one launch after another the keys of one attention (the parts of a ring).
   * With sinks_outside_lse no gradient of lse may be in it. */
  const float* delta;
  const float* sinks; /* as in forward */
  float* dsinks;      /* [heads], when the problem has_dsinks: gradient of sinks, written; with
                         accumulate added to. The sums run in one order, on every thread count */
  const void* mask;   /* as in forward */
  const void* bias;   /* as in forward */
  void* dbias;        /* bias's shape, when the problem has_dbias */
} strobe_backward_args;

/* What a mask is packed from: intervals, a tensor of bools, lists of blocks, or several of these. A
 * pair is allowed if all that are given allow it, but for a block that full_blocks has: there all
 * pairs are. Numbers may be any: intervals are cut to the keys that there are, one that ends before
 * it begins is empty, counts are cut to the columns, and a block that does not exist is left out.
 * Pointers are NULL where something is not given, and lie on the problem's device.
 *
 * Rows are those of q: of [batch, heads, seqlen_q] as problem.mask has batch and heads (an extent
 * of 1 stands for all), packed sequences' of [heads, total_q]. */
typedef struct strobe_mask_args {
  size_t struct_size; /* sizeof(strobe_mask_args) of the caller's header */
  /* [rows, seqlen_k] bytes; other than 0: the query attends to the key. Packed: a row has the keys
   * of its sequence, the longest of which has seqlen_k. */
  const uint8_t* keep;
  /* In bytes: dim is from a key to the next, any will do. Packed: the batch stride is not used.
   * All zero: contiguous. */
  strobe_strides keep_strides;
  /* [rows, 4], contiguous: the query sees the keys [begin, end) of two intervals: begin, end,
   * begin, end. They may overlap, and either may be empty. */
  const int32_t* intervals;
  /* Of each block of queries, which blocks of keys it may see; where either list is given, no
   * others. Entries may come in any order and repeat. Blocks of queries are those of [batch, heads,
   * blocks of seqlen_q]. Packed: of [heads, total_q / block_q + batch], where the first block of
   * sequence b is number cu_seqlens_q[b] / block_q + b. Contiguous. */
  const int32_t* partial_counts; /* [blocks of queries]: entries of partial_blocks */
  const int32_t* partial_blocks; /* [blocks of queries, partial_columns]: blocks of keys that are
                                    seen as far as the rest allows it */
  int64_t partial_columns;       /* of partial_blocks */
  /* [blocks of queries, partial_columns, block_q, block_k / 32]: the pairs of those entries; bit j
   * of a word w is key 32 w + j of the block. Of entries that repeat a pair may be in either. NULL:
   * all pairs. */
  const uint32_t* partial_bits;
  const int32_t* full_counts; /* [blocks of queries]: entries of full_blocks */
  const int32_t* full_blocks; /* [blocks of queries, full_columns]: blocks of keys of which all
                                 pairs are allowed, whatever keep, intervals and bits say */
  int64_t full_columns;       /* of full_blocks */
  const int32_t *cu_seqlens_q, *cu_seqlens_k; /* varlen: as in forward (k: not with a cache) */
  void* packed;        /* gets the mask: strobe_mask_bytes, 16-byte aligned */
  size_t packed_bytes; /* of packed, at least strobe_mask_bytes */
  void* stream;        /* CUDA: cudaStream_t */
} strobe_mask_args;

/* What strobe_mask_pack writes: 32-bit words, in sections that begin at multiples of 32 words, in
 * this order. With
 *   Q, K   blocks of queries and of keys. Dense: batch * heads * ceil(seqlen / block), numbered in
 *          that order, with the mask's batch and heads. Packed: heads * (total / block + batch),
 *          where the first of sequence b in a head is number cu_seqlens[b] / block + b. (With a
 *          cache the keys are always dense: seqlen_k.)
 *   C, P   capacity and partial_capacity
 *   k, q   block_k and block_q
 *
 *   header         32             STROBE_MASK_MAGIC; block_q, block_k; Q, K, C, P; how many entries
 *                                 the mask needs, and for how many of them bits (which may be more
 *                                 than C and P: pack again with these); the number of blocks of
 *                                 queries that are over capacity; seqlen_q and seqlen_k (packed:
 *                                 total_q, total_k) that it is for; zeros
 *   lists          Q [2]          of a block of queries: its first entry, and how many; -1: it is
 *                                 over capacity
 *   entries        C [2]          block of keys, ascending; place of its bits, -1: it is full
 *   order          Q              blocks of queries, by their entries: most first, then by number
 *   key lists      K [2]          of a block of keys: its first entry, and how many
 *   key entries    C [4]          block of queries, ascending; place of the bits or -1; the rank of
 *                                 the block of keys among the block of queries' entries, and how
 *                                 many these are
 *   key order      K              as order
 *   bits           P [q][k / 32]  bit j of word w of a row: key 32 w + j of the block
 *   key bits       P [k][q / 32]  the same pairs, by keys: bit i of word w is query 32 w + i
 *
 * Numbers of blocks in entries are those within their sequence. Bits of rows that do not exist are
 * 0. A block is full if every pair of it that exists is allowed. */
#define STROBE_MASK_MAGIC 0x314B534D /* "MSK1" */

/* Fills *problem with the defaults. struct_size: sizeof(strobe_problem). */
STROBE_API strobe_status strobe_problem_init(strobe_problem* problem,
                                             size_t struct_size) STROBE_NOEXCEPT;

/* Checks the problem and decides how to run it. On failure *plan is left as it was. Reads no
 * tensor. With STROBE_LOG=1 in the environment, the first launch of each problem writes a line to
 * stderr: the kernel, and why those before it declined. */
STROBE_API strobe_status strobe_plan_make(const strobe_problem* problem,
                                          strobe_plan* plan) STROBE_NOEXCEPT;

/* Choice number index of those that there are for the problem. Number 0 is what the rules choose,
 * which strobe_plan_make takes where no table says otherwise (strobe_tuning_load).
 * STROBE_INVALID_ARGUMENT past the last one. */
STROBE_API strobe_status strobe_plan_choice(const strobe_problem* problem, int32_t index,
                                            strobe_choice* choice) STROBE_NOEXCEPT;

/* As strobe_plan_make, with this choice: for those who measure, and for tests. What batch_invariant
 * and deterministic promise holds among plans of the same choice. */
STROBE_API strobe_status strobe_plan_make_chosen(const strobe_problem* problem,
                                                 const strobe_choice* choice,
                                                 strobe_plan* plan) STROBE_NOEXCEPT;

/* Puts a file of choices into force that "strobe tune" wrote on this machine: plans that are made
 * from now on take them where the file has the problem's bucket. NULL: none is in force. The
 * library loads one by itself when the first plan is made: STROBE_TUNING's, or tuning.json of the
 * folder strobe in the user's cache folder (XDG_CACHE_HOME, else ~/.cache), if it is there and
 * good; STROBE_TUNING=0: none. STROBE_INVALID_ARGUMENT where the file cannot be read, is no tuning
 * file or is of another version of the library; what was in force then stays. */
STROBE_API strobe_status strobe_tuning_load(const char* path) STROBE_NOEXCEPT;

/* Which file is in force, and how many of its choices are for this machine; or "none", and why
 * where there is a reason. In one line. Lengths as strobe_plan_text. */
STROBE_API size_t strobe_tuning_text(char* text, size_t capacity) STROBE_NOEXCEPT;

/* The plan in words: kernel, tile, threads or grid, workspace, and why each kernel before it
 * declined; or what is invalid about a plan that strobe_plan_make did not make. Writes at most
 * capacity bytes, always ending in NUL where capacity > 0; returns the length of the whole text. */
STROBE_API size_t strobe_plan_text(const strobe_plan* plan, char* text,
                                   size_t capacity) STROBE_NOEXCEPT;

/* STROBE_OK when some kernel takes the problem. */
STROBE_API strobe_status strobe_supports(const strobe_problem* problem) STROBE_NOEXCEPT;

/* One line a kernel: takes it, and the estimate that decided where there was one, or why it
 * declines, and a hint; or what is invalid. Lengths as strobe_plan_text. */
STROBE_API size_t strobe_why(const strobe_problem* problem, char* text,
                             size_t capacity) STROBE_NOEXCEPT;

/* Runs a plan. Returns when the result is there (CPU) or enqueued (CUDA).
 * With a workspace of the caller's: no allocation, no environment look-up, no synchronisation. */
STROBE_API strobe_status strobe_forward(const strobe_plan* plan,
                                        const strobe_forward_args* args) STROBE_NOEXCEPT;
/* Runs a plan of the backward direction: as strobe_forward. */
STROBE_API strobe_status strobe_backward(const strobe_plan* plan,
                                         const strobe_backward_args* args) STROBE_NOEXCEPT;

/* Bytes that a packed mask of the problem takes. */
STROBE_API strobe_status strobe_mask_bytes(const strobe_problem* problem,
                                           size_t* bytes) STROBE_NOEXCEPT;

/* Packs a mask for all problems with these lengths, batch, heads and mask, whatever their
 * direction, dtype and rule are; the threads are problem->threads. What it is made of is read once,
 * and where blocks are seen in part a second time. Returns when it is there (CPU) or enqueued
 * (CUDA); no launch waits for the host. What is over capacity is no error: the header says so, and
 * rows become NaN. The words are the same on every device. */
STROBE_API strobe_status strobe_mask_pack(const strobe_problem* problem,
                                          const strobe_mask_args* args) STROBE_NOEXCEPT;

/* A tensor of floats and its quantised form, as a cache has it, for strobe_quantize and
 * strobe_dequantize. */
typedef struct strobe_quantize_args {
  size_t struct_size;     /* sizeof(strobe_quantize_args) of the caller's header */
  int32_t device;         /* strobe_device */
  int32_t device_index;   /* CUDA: which GPU. CPU: 0 */
  int32_t dtype;          /* strobe_dtype of x: float32, bfloat16 or float16 */
  int32_t kv_dtype;       /* of codes: int8, float8 e4m3, float8 e5m2, q8_0 or q4_0 */
  int32_t kv_scale;       /* strobe_kv_scale, as in strobe_problem */
  int32_t kv_scale_dtype; /* of scale: STROBE_FLOAT32 or, not of batch and head, STROBE_FLOAT16 */
  int32_t scale_is_given; /* strobe_quantize: 1: scale is read, and not made. Else 0 */
  int32_t threads;        /* CPU threads to use at most. 0: OpenMP's number */
  int64_t batch, seqlen, heads, head_dim; /* of x; >= 0; head_dim 1 to 256 */
  /* x: elements; codes: bytes; scale: elements, dim is not used. As in strobe_problem: all zero:
   * contiguous. */
  strobe_strides x_strides, codes_strides, scale_strides;
  void* x;      /* [batch, seqlen, heads, head_dim]: strobe_quantize reads it alone */
  void* codes;  /* [batch, seqlen, heads, bytes of a row]: strobe_dequantize reads them alone */
  void* scale;  /* [batch, seqlen, heads], [batch, heads_kv], [heads_kv] or one; NULL where kv_scale
                   is none */
  void* stream; /* CUDA: cudaStream_t */
  /* Heads of the scales of heads, [batch, heads_kv] and [heads_kv]; divides heads: as many
   * neighbouring heads share a scale as query heads share a key head. 0: as many as heads. */
  int64_t heads_kv;
  /* 1: what is quantised is each row of x times the orthonormal Hadamard matrix (Sylvester's), in
   * float32; head_dim is a power of two, or a multiple of 16, whose rows are rotated in blocks of
   * the largest power of two that divides it (96: three of 32, 192: three of 64). Scores of q and k
   * that both were rotated so are what they were, and values that stood out are spread over the
   * row, or its block, so that codes are nearer. It is its own inverse: strobe_dequantize then
   * rotates back. 0 (default): not rotated. */
  int64_t hadamard;
  /* strobe_quantize, with scales of rows that are made: so many rows of a head, from a multiple of
   * it on, share a scale, as in block-wise quantisation. The last block may be shorter. scale is
   * [batch, seqlen, heads] all the same, with a block's scale at each of its rows, as caches are
   * read. 0 (default) and 1: each row has its own. */
  int64_t scale_rows;
} strobe_quantize_args;

/* Quantises x as an append does. Scales of blocks of rows, of heads, of batch and head, or of the
 * tensor are made as those of rows are, from the largest magnitude of what shares them. Returns
 * when the result is there (CPU) or enqueued (CUDA). */
STROBE_API strobe_status strobe_quantize(const strobe_quantize_args* args) STROBE_NOEXCEPT;
/* Writes to x the values that codes and scales stand for, rounded to its dtype. */
STROBE_API strobe_status strobe_dequantize(const strobe_quantize_args* args) STROBE_NOEXCEPT;

/* Partial results of one attention, whose keys were divided into parts, and where the whole goes.
 * Packed problems: batch 1, and seqlen_q their rows. */
typedef struct strobe_merge_args {
  size_t struct_size;             /* sizeof(strobe_merge_args) of the caller's header */
  int32_t device;                 /* strobe_device */
  int32_t device_index;           /* CUDA: which GPU. CPU: 0 */
  int32_t out_dtype;              /* strobe_dtype of out: float32, bfloat16 or float16 */
  int32_t threads;                /* CPU threads to use at most. 0: OpenMP's number */
  int64_t parts;                  /* how many partial results there are; >= 0 */
  int64_t batch, seqlen_q, heads; /* of out; >= 0 */
  int64_t head_dim_v;             /* of out; 1 to 512 */
  const float* outs;              /* float32 [parts, batch, seqlen_q, heads, head_dim_v] */
  /* [parts, batch, heads, seqlen_q]. A row without keys in a part has an infinite lse there: -inf,
   * or +inf as flash_attn 2 has it. What its outs hold does not count. */
  const float* lses;
  void* out;  /* [batch, seqlen_q, heads, head_dim_v]: 0 where all parts are without keys */
  float* lse; /* [batch, heads, seqlen_q]: -inf there. NULL: not wanted */
  /* Elements. All zero: contiguous in the order above. The dim stride of outs and out must be 1;
   * that of lses and lse is not used. */
  strobe_strides outs_strides, lses_strides, out_strides, lse_strides;
  int64_t outs_part, lses_part; /* from a part to the next; 0: contiguous after the part's own
                                   extents (given strides: must be given when parts > 1) */
  void* stream;                 /* CUDA: cudaStream_t */
  /* [heads]: attention sinks, which enter here, once, where the parts were computed without. lse
   * has them. NULL: none. A caller whose struct ends before this (struct_size) is served too. */
  const float* sinks;
} strobe_merge_args;

/* Merges partial results exactly: out = sum of exp(lses - lse) * outs, lse = log of the sum of
 * exp(lses), over the parts. A value of out lies between the smallest and the largest of the parts'
 * values. What a part without weight holds does not count: one without keys, or whose lse is so far
 * below the others' that its weight is 0 in float32. A NaN in lses makes its row NaN. With sinks,
 * exp(sink) is one more term of the sum. out and lse must not overlap outs, lses, sinks or each
 * other; but a float32 out may be one of the parts of outs, with its strides, and lse one of lses:
 * the part is then replaced by the whole. Returns when the result is there (CPU) or enqueued
 * (CUDA). */
STROBE_API strobe_status strobe_merge(const strobe_merge_args* args) STROBE_NOEXCEPT;

/* Float32 gradients of one part of a problem, and where they go. Packed problems: batch 1, and
 * seqlen their rows. */
typedef struct strobe_add_args {
  size_t struct_size;                    /* sizeof(strobe_add_args) of the caller's header */
  int32_t device;                        /* strobe_device */
  int32_t device_index;                  /* CUDA: which GPU. CPU: 0 */
  int32_t out_dtype;                     /* strobe_dtype of out: float32, bfloat16 or float16 */
  int32_t threads;                       /* CPU threads to use at most. 0: OpenMP's number */
  int64_t accumulate;                    /* 1: out becomes out + x; 0: out becomes x */
  int64_t batch, seqlen, heads;          /* of x and out; >= 0 */
  int64_t head_dim;                      /* of x and out; 1 to 512 */
  const float* x;                        /* float32 [batch, seqlen, heads, head_dim] */
  void* out;                             /* [batch, seqlen, heads, head_dim] */
  strobe_strides x_strides, out_strides; /* elements; all zero: contiguous; dim must be 1 */
  void* stream;                          /* CUDA: cudaStream_t */
} strobe_add_args;

/* Adds gradients that another device computed to those that are here, or rounds float32 gradients
 * to out_dtype: what there is to do around launches whose grad_dtype is float32, when a problem is
 * computed in parts. The sum is made in float32 and rounded once. out must not overlap x. Returns
 * when the result is there (CPU) or enqueued (CUDA). */
STROBE_API strobe_status strobe_add(const strobe_add_args* args) STROBE_NOEXCEPT;

/* The keep (1) or drop (0) decision of dropout for each weight, as forward and backward draw it:
 * for tests and for frameworks that show it. mask: [batch, heads, seqlen_q, seqlen_k] bytes, at
 * most 2^58, contiguous, host memory. */
STROBE_API strobe_status strobe_dropout_mask(int64_t batch, int64_t heads, int64_t seqlen_q,
                                             int64_t seqlen_k, float dropout_p, uint64_t seed,
                                             uint64_t offset, uint8_t* mask) STROBE_NOEXCEPT;

/* A part of that mask, for callers that want to be heard in between: bytes first to
 * first + count - 1 of it, written to mask[0] to mask[count - 1]. */
STROBE_API strobe_status strobe_dropout_mask_part(int64_t batch, int64_t heads, int64_t seqlen_q,
                                                  int64_t seqlen_k, float dropout_p, uint64_t seed,
                                                  uint64_t offset, int64_t first, int64_t count,
                                                  uint8_t* mask) STROBE_NOEXCEPT;

/* Text of the calling thread's latest failure, at most 400 bytes (a longer one ends in "...");
 * "" when there was none. Valid until the thread's next failing call. */
STROBE_API const char* strobe_last_error(void) STROBE_NOEXCEPT;
/* "STROBE_OK", ... */
STROBE_API const char* strobe_status_name(strobe_status status) STROBE_NOEXCEPT;
/* Version of the library at work: "0.2.0". */
STROBE_API const char* strobe_version(void) STROBE_NOEXCEPT;

/* The kernel table, in the order in which the plan asks them. NULL past the end. */
STROBE_API const char* strobe_kernel_name(int32_t index) STROBE_NOEXCEPT;
/* NULL when the kernel can run on this machine, else why not ("this CPU has no AVX-512", "no CUDA
 * driver found"). */
STROBE_API const char* strobe_kernel_unavailable(int32_t index) STROBE_NOEXCEPT;

/* Why kernel no. index would not take the problem on a machine that can run the kernel; "" when it
 * would. Lengths as strobe_plan_text. */
STROBE_API size_t strobe_kernel_declines(int32_t index, const strobe_problem* problem, char* text,
                                         size_t capacity) STROBE_NOEXCEPT;

/* What the library found on this machine. */
typedef struct strobe_machine {
  size_t struct_size;    /* set before the call */
  char cpu_name[64];     /* "" when unknown */
  char cpu_isa[16];      /* widest instruction set in use, one of cpu_isas: "avx512", "neon" */
  char cpu_isas[64];     /* all that this CPU and build have, separated by spaces, widest first:
                            STROBE_CPU_ISA limits the use to those from one of them on */
  int32_t cpu_threads;   /* OpenMP's number */
  int32_t cuda_devices;  /* 0: none, or no driver */
  char cuda_reason[128]; /* why there are none; "" when there are */
  char compiler[64];     /* that built the library */
} strobe_machine;

/* Fills *machine, whose struct_size is set. */
STROBE_API strobe_status strobe_machine_info(strobe_machine* machine) STROBE_NOEXCEPT;

/* One CUDA device. */
typedef struct strobe_cuda_device {
  size_t struct_size;         /* set before the call */
  char name[128];             /* as the driver has it: "NVIDIA H100 80GB HBM3" */
  int32_t compute_capability; /* 90 for 9.0 */
  int32_t multiprocessors;    /* how many the GPU has */
  int64_t memory_bytes;       /* of the GPU, in use or not */
} strobe_cuda_device;

/* Fills *device, whose struct_size is set. STROBE_INVALID_ARGUMENT past the last device. */
STROBE_API strobe_status strobe_cuda_device_info(int32_t index,
                                                 strobe_cuda_device* device) STROBE_NOEXCEPT;

#ifdef __cplusplus
}
#endif

#endif /* STROBE_STROBE_H_ */
