// Step 4: parallel over the sequence as well (arXiv:2307.08691, section 3.2, "Parallelism").
//
// Step 3 but for the number of thread blocks: one for each tile of queries of each head. No tile
// needs another's results, as the rows of attention do not, so they need not be one after the
// other. The kernel is step 3's to the last instruction; the grid alone is larger.
//
// A GPU has some hundred multiprocessors, and each of them has room for two of these thread blocks.
// With batch * heads thread blocks most of it is idle where sequences are long, as then batches are
// small: at 16384 tokens of 16 heads of 128, step 3 has 16 thread blocks and this step 4096.
#ifndef STROBE_EXAMPLES_PAPER_4_SEQUENCE_CUH_
#define STROBE_EXAMPLES_PAPER_4_SEQUENCE_CUH_

#include "3_unscaled.cuh"

namespace strobe::paper {

struct Sequence : Unscaled {
  static constexpr int thread_blocks(int tiles) { return tiles; }
};

}  // namespace strobe::paper

#endif  // STROBE_EXAMPLES_PAPER_4_SEQUENCE_CUH_
