#include "core/random_blocks.h"

namespace strobe {

RandomBlocks strobe_random_blocks;

}  // namespace strobe
