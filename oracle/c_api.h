/* The oracle for other languages: plain structs of numbers and of pointers to dense arrays.
 * Python's tests call it (tests/python/oracle.py). Functions give 0, or 1 where struct_size is
 * another than this header's.
 *
 * Tensors are float64: q [rows_q, heads, head_dim], k and v [rows_k, heads_kv, head_dim or
 * head_dim_v], out and dout [rows_q, heads, head_dim_v], lse, dlse and size [rows_q, heads], bias
 * and dbias [bias_rows, bias_heads, bias_keys].
 * oracle.h says what everything means. */
#ifndef STROBE_ORACLE_C_API_H_
#define STROBE_ORACLE_C_API_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ORACLE_NO_POSITION INT64_MIN /* the last query is at the last key */
#define ORACLE_FLOAT64                                                      \
  (-1) /* the oracle; 0, 1, 2: the comparator in float32, bfloat16, float16 \
        */

typedef struct oracle_sequence {
  int64_t q_begin, q_length, k_begin, k_length, q_position, prefix;
} oracle_sequence;

typedef struct oracle_problem {
  int64_t struct_size;
  int64_t sequence_count;
  const oracle_sequence* sequences;
  int64_t heads, heads_kv, head_dim, head_dim_v, rows_q, rows_k;
  int64_t causal, window_left, window_right, window_signed, attention_chunk;
  double scale, softcap, dropout_p;
  const double* slopes; /* [sequences, heads], or NULL */
  const uint8_t* keep;  /* [sequences, heads, keep_rows, keep_columns], with dropout_p > 0 */
  int64_t keep_rows, keep_columns;
  const double *q, *k, *v, *dout, *dlse; /* dout NULL: forward alone; dlse may be NULL */
  int64_t arithmetic;
  uint64_t noise_seed;                     /* of the comparator: comparator.h */
  double *out, *lse, *size, *dq, *dk, *dv; /* results; lse and size of the oracle alone */
  const double* sinks;                     /* [heads], or NULL */
  int64_t sinks_outside_lse;
  double* dsinks;     /* [heads], a result */
  const double* bias; /* NULL: none */
  double* dbias;      /* a result too */
  int64_t bias_rows, bias_queries, bias_heads, bias_keys;
} oracle_problem;

int32_t oracle_attention(const oracle_problem* problem);

/* seen: [q_length, k_length] of that sequence, 1 where the query sees the key. */
int32_t oracle_visible(const oracle_problem* problem, int64_t sequence, uint8_t* seen);

/* keep: [batch, heads, rows, columns]. */
void oracle_dropout_mask(int64_t batch, int64_t heads, int64_t rows, int64_t columns,
                         float dropout_p, uint64_t seed, uint64_t offset, uint8_t* keep);

typedef struct oracle_cached_sequence {
  int64_t leftpad, used, added, new_begin, rotary_start;
  int64_t rows_begin; /* of its used + added numbers in `rows` */
} oracle_cached_sequence;

typedef struct oracle_cache {
  int64_t struct_size;
  const oracle_cached_sequence* sequences; /* as many as the problem has */
  const int64_t* rows;                     /* of k and v */
  int64_t cache_rows, new_rows, positions, pairs, interleaved;
  const double *k, *v;           /* [cache_rows, heads_kv, dim]; oracle_gather alone reads them */
  const double *k_new, *v_new;   /* [new_rows, heads_kv, dim]; oracle_append alone reads them */
  const double *cosines, *sines; /* [positions, pairs]; pairs 0: no rotary embedding */
} oracle_cache;

/* What an append writes: k and v of the new rows of all sequences, one sequence after the other. */
int32_t oracle_append(const oracle_problem* problem, const oracle_cache* cache, double* k,
                      double* v);

/* The keys of all sequences end to end, and q turned. sequences: the problem's, with k_begin and
 * k_length. */
int32_t oracle_gather(const oracle_problem* problem, const oracle_cache* cache,
                      oracle_sequence* sequences, double* q, double* k, double* v);

/* outs [parts, rows, heads, dim] and lses [parts, rows, heads] to out [rows, heads, dim] and lse
 * [rows, heads]. sinks: [heads], or NULL. */
void oracle_merge(int64_t parts, int64_t rows, int64_t heads, int64_t dim, const double* outs,
                  const double* lses, const double* sinks, double* out, double* lse);

#ifdef __cplusplus
}
#endif

#endif /* STROBE_ORACLE_C_API_H_ */
