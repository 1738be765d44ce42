#include "cpu/fill_plan.h"

#include <algorithm>
#include <cinttypes>

#include "core/team.h"
#include "core/workspace.h"
#include "cpu/backward_sinks.h"
#include "cpu/blocks.h"
#include "cpu/contexts.h"
#include "cpu/decode_items.h"
#include "cpu/own_numbers.h"

namespace strobe::cpu {

namespace {

// FLOP that make a launch worth one more thread: waking a thread for less than about a million
// costs more than it saves.
constexpr double kFlopPerThread = 1e6;
// Work is cut finer until each thread has about this many items, so that the thread that finishes
// last is not far behind the others.
constexpr int64_t kItemsPerThread = 4;
// A deterministic backward is cut into at least this many work items for every number of threads.
constexpr int64_t kDeterministicItems = 128;

double flop(const AttentionProblem& p) {
  const double scores = static_cast<double>(p.heads) *
                        (static_cast<double>(rows_q(p)) * static_cast<double>(p.seqlen_k));
  return scores * 2.0 * static_cast<double>(p.head_dim + p.head_dim_v) *
         (p.direction == STROBE_FORWARD ? 1.0 : 2.5);
}

// What finding, fetching and weighing the keys of a decoded problem takes beside the products, as
// the FLOP of a row that take as long. Measured with AVX-512: 27 cycles a key and head, and half a
// cycle a column.
double beside_products(const AttentionProblem& p) {
  constexpr double kColumns = 96;
  return 2.0 * kColumns * static_cast<double>(p.batch) * static_cast<double>(p.heads_kv) *
         static_cast<double>(p.seqlen_k);
}

// Blocks of the same size, of whole tiles and at most `block`: 5 blocks of 410 rather than 4 of 512
// and one of 2.
int64_t even_block(int64_t length, int64_t tile, int64_t block) {
  const int64_t blocks = max64(1, ceil_div(length, block));
  return max64(tile, round_up(ceil_div(length, blocks), tile));
}

// The largest multiple of tile, at most max_block, that cuts `length` into enough blocks for
// `wanted` items.
int64_t choose_block(int64_t length, int64_t tile, int64_t max_block, int64_t others,
                     int64_t wanted) {
  int64_t block = max_block;
  while (block > tile && others * ceil_div(length, block) < wanted)
    block = round_up(block / 2, tile);
  return even_block(length, tile, block);
}

// Queries of a forward launch's items: block, or a part of a tile where there are at least two
// threads that are worth waking for each item. (With fewer, some thread would have two parts.)
// Parts are halves of halves, so that each lies in one block of a mask as data.
int64_t rows_of_items(const AttentionProblem& p, const Tiles& tiles, int64_t block,
                      int64_t threads) {
  const int64_t others = p.batch * p.heads, items = others * ceil_div(p.seqlen_q, block);
  if (tiles.part_q == 0 || items == 0 || 2 * items > threads) return block;
  const int64_t wanted = max64(tiles.part_q, ceil_div(p.seqlen_q, ceil_div(threads, others)));
  int64_t rows = tiles.tile_q;
  while (rows / 2 >= wanted) rows /= 2;
  return min64(block, rows);
}

// What a forward or a backward launch is cut into, where work items are blocks of rows.
int64_t rows_to_cut(const AttentionProblem& p) {
  return p.direction == STROBE_FORWARD ? p.seqlen_q : p.seqlen_k;
}
int64_t tile_to_cut(const AttentionProblem& p, const Tiles& tiles) {
  return p.direction == STROBE_FORWARD ? tiles.tile_q : tiles.tile_k;
}
int64_t part_to_cut(const AttentionProblem& p, const Tiles& tiles) {
  return p.direction == STROBE_FORWARD ? tiles.part_q : 0;
}

// Whether a block of keys has to be the same whatever the problem's lengths are: how many rows a
// sequence is given beyond those that it uses, its neighbours decide.
bool has_any_length(const AttentionProblem& p) {
  return p.direction == STROBE_BACKWARD && p.batch_invariant && (p.varlen || p.has_seqused_k);
}
// What the plan has of a choice's block.
int64_t chosen_block(const AttentionProblem& p, int64_t tile, int64_t block) {
  // (Less than a tile is a part of one: rows_of_items.)
  return has_any_length(p) || block < tile ? block : even_block(rows_to_cut(p), tile, block);
}

Tiles tiles_of(const InstructionSet& isa, const AttentionProblem& p) {
  return p.direction == STROBE_FORWARD ? isa.forward_tiles(p) : isa.backward_tiles(p);
}

// Why a choice's block is none for the problem; empty where it is one.
std::string block_declines(const InstructionSet& isa, const AttentionProblem& p, int64_t block) {
  if (DecodeUse(isa, p).all) {
    if (block == 0) return {};
    return format("choice.block = %" PRId64 ", expected 0 (few queries: items are of keys)", block);
  }
  const Tiles tiles = tiles_of(isa, p);
  const int64_t tile = tile_to_cut(p, tiles);
  if (tile <= block && block <= tiles.max_block && block % tile == 0) return {};
  const int64_t part = part_to_cut(p, tiles);
  if (part > 0 && part <= block && block < tile && tile % block == 0) return {};
  const std::string parts =
      part > 0 ? format(", or %" PRId64 " divided by 2, down to %" PRId64, tile, part)
               : std::string();
  return format("choice.block = %" PRId64 ", expected a multiple of %" PRId64 " up to %" PRId64
                "%s",
                block, tile, tiles.max_block, parts.c_str());
}

}  // namespace

std::string fill_plan(const InstructionSet& isa, Plan& plan, const Choice* choice) {
  const AttentionProblem& p = plan.problem;
  if (choice) {
    if (std::string reason = block_declines(isa, p, choice->block); !reason.empty()) return reason;
  }
  const int64_t threads = threads_or_default(p.threads);
  const DecodeUse decode(isa, p);
  const double work = flop(p) + (decode.all ? beside_products(p) : 0);
  const int64_t useful = min64(threads, 1 + static_cast<int64_t>(work / kFlopPerThread));
  const int64_t wanted = useful == 1 ? 1 : threads * kItemsPerThread;  // work items
  const bool forward = p.direction == STROBE_FORWARD;
  const Tiles tiles = tiles_of(isa, p);
  plan.tile_q = tiles.tile_q;
  plan.tile_k = tiles.tile_k;
  plan.work_items = 0;
  size_t scratch = 0;
  if (decode.some) {
    const DecodePlan split(isa, p, useful);
    plan.work_items = split.work_items;
    plan.block_k = min64(split.item_blocks * kDecodeKeys, p.seqlen_k);
    plan.tile_q = split.shape.heads * split.shape.item_rows;
    plan.tile_k = kDecodeKeys;
    scratch = split.kernel.scratch(forward_context(isa, plan, {}));
  }
  if (forward && !decode.all) {
    plan.tile_q = tiles.tile_q;
    plan.tile_k = tiles.tile_k;
    plan.block_q = choice ? chosen_block(p, plan.tile_q, choice->block)
                          : rows_of_items(p, tiles,
                                          choose_block(p.seqlen_q, plan.tile_q, tiles.max_block,
                                                       p.batch * p.heads, wanted),
                                          useful);
    plan.work_items += Blocks::of_queries(p, nullptr, plan.block_q).count();
    scratch = std::max(scratch, isa.forward_scratch(forward_context(isa, plan, {})));
  } else if (!forward) {
    if (choice) {
      plan.block_k = chosen_block(p, plan.tile_k, choice->block);
    } else if (has_any_length(p)) {
      plan.block_k = tiles.max_block;
    } else {
      plan.block_k = choose_block(p.seqlen_k, plan.tile_k, tiles.max_block,
                                  p.batch_invariant ? p.heads_kv : p.batch * p.heads_kv,
                                  p.deterministic ? kDeterministicItems : wanted);
    }
    plan.work_items = Blocks::of_keys(p, nullptr, plan.block_k).count();
    scratch = isa.backward_scratch(backward_context(plan, {}, isa.lanes));
  }
  plan.threads = static_cast<int32_t>(max64(1, min64(useful, plan.work_items)));
  plan.workspace_bytes = shared_bytes(isa, plan, useful) +
                         static_cast<size_t>(plan.threads) * round_up_to_alignment(scratch);
  return {};
}

size_t shared_bytes(const InstructionSet& isa, const Plan& plan, int64_t threads) {
  const AttentionProblem& p = plan.problem;
  size_t bytes = number_bytes(p);
  if (p.direction == STROBE_BACKWARD) {
    BackwardContext context = backward_context(plan, {}, isa.lanes);
    Arena arena;
    carve(arena, context);
    BackwardSinks(BackwardArgs{}, arena, context);
    bytes += arena.used();
  } else if (DecodeUse(isa, p).some) {
    bytes += DecodePlan(isa, p, threads).bytes;
  }
  return bytes;
}

std::vector<int64_t> blocks_to_choose(const InstructionSet& isa, const AttentionProblem& p) {
  if (DecodeUse(isa, p).all) return {0};
  const Tiles tiles = tiles_of(isa, p);
  const int64_t tile = tile_to_cut(p, tiles), part = part_to_cut(p, tiles);
  std::vector<int64_t> blocks;
  for (int64_t most = tiles.max_block;; most = round_up(most / 2, tile)) {
    const int64_t block = chosen_block(p, tile, most);
    if (std::find(blocks.begin(), blocks.end(), block) == blocks.end()) blocks.push_back(block);
    if (most <= tile) break;
  }
  // Parts of a tile: where heads have one tile, or threads enough for the rules to take parts.
  if (part > 0 && (p.seqlen_q <= tile || 2 * p.batch * p.heads <= threads_or_default(p.threads))) {
    for (int64_t block = tile / 2; block >= part; block /= 2)
      if (block < p.seqlen_q) blocks.push_back(block);
  }
  return blocks;
}

}  // namespace strobe::cpu
