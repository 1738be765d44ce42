// A driver and an NCCL for tests on machines without a GPU: what strobe::Gpu and
// strobe::NcclCommunicator call. Built as one library, which is found as libcuda.so.1 and as
// libnccl.so.2. The GPU's memory is the host's, and streams do late what they are told: nothing is
// done before somebody asks whether it is, and then a step of one stream after a step of another,
// in an order that a seed draws. So what nothing orders happens in the wrong order, at some seed.
// Of an address that lies in none of its blocks it says so, and where one ends nobody's page
// begins.
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#define FAKE extern "C" __attribute__((visibility("default")))

namespace {

struct Event {
  int64_t recorded = 0, reached = 0;  // how often, by the host and by streams
};

struct Transfer {
  bool sends;
  std::byte* data;
  size_t bytes;
  int from, to;
  bool done = false;
};

struct Step {
  enum Kind { kCopy, kFill, kRecord, kWait, kMessages } kind = kCopy;
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  size_t to_pitch = 0, from_pitch = 0, bytes = 0, lines = 1;
  Event* event = nullptr;
  int64_t number = 0;  // of the record that is waited for
  std::vector<std::shared_ptr<Transfer>> messages = {};
  bool posted = false;
};

struct Stream {
  std::deque<Step> steps;
};

struct Group {  // of communicators
  int ranks = 0, made = 0;
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<Transfer>>> sends, receives;
};
struct Comm {
  std::shared_ptr<Group> group;
  int rank = 0, error = 0;
  bool aborted = false, blocks = true;
};

std::mutex mutex;
std::map<void*, std::unique_ptr<Stream>> streams;
uint64_t state = 1;
thread_local int depth = 0;
thread_local std::vector<std::pair<std::shared_ptr<Transfer>, std::pair<Comm*, void*>>> group;

uint64_t Draw() {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return state >> 33;
}

Stream& Of(void* stream) {
  std::unique_ptr<Stream>& found = streams[stream];
  if (!found) found = std::make_unique<Stream>();
  return *found;
}

// Whether the first step of the stream is done by now.
bool Try(Stream& stream) {
  Step& step = stream.steps.front();
  switch (step.kind) {
    case Step::kCopy:
      for (size_t n = 0; n < step.lines; ++n)
        std::memcpy(step.to + n * step.to_pitch, step.from + n * step.from_pitch, step.bytes);
      return true;
    case Step::kFill:
      std::memset(step.to, 0, step.bytes);
      return true;
    case Step::kRecord:
      step.event->reached = step.number;
      return true;
    case Step::kWait:
      return step.event->reached >= step.number;
    case Step::kMessages:
      for (const auto& message : step.messages)
        if (!message->done) return false;
      return true;
  }
  return true;
}

void Post(Group& g, Step& step) {
  step.posted = true;
  for (const auto& message : step.messages)
    (message->sends ? g.sends : g.receives)[{message->from, message->to}].push_back(message);
}

std::map<void*, Group*> group_of_stream;

void Match(Group& g) {
  for (auto& [pair, sends] : g.sends) {
    auto& receives = g.receives[pair];
    while (!sends.empty() && !receives.empty()) {
      if (sends.front()->bytes != receives.front()->bytes) std::abort();
      std::memcpy(receives.front()->data, sends.front()->data, sends.front()->bytes);
      sends.front()->done = receives.front()->done = true;
      sends.pop_front();
      receives.pop_front();
    }
  }
}

// A step of some stream; false: none can go on.
bool Advance() {
  std::vector<std::pair<void*, Stream*>> able;
  for (auto& [name, stream] : streams) {
    if (stream->steps.empty()) continue;
    Step& step = stream->steps.front();
    if (step.kind == Step::kMessages && !step.posted) {
      able.emplace_back(name, stream.get());
    } else if (step.kind == Step::kMessages ? Try(*stream)
                                            : step.kind != Step::kWait || Try(*stream)) {
      able.emplace_back(name, stream.get());
    }
  }
  if (able.empty()) return false;
  auto [name, stream] = able[Draw() % able.size()];
  Step& step = stream->steps.front();
  if (step.kind == Step::kMessages && !step.posted) {
    Post(*group_of_stream[name], step);
    Match(*group_of_stream[name]);
    return true;
  }
  if (Try(*stream)) stream->steps.pop_front();
  return true;
}

// STROBE_FAKE_AT_ONCE: streams do at once what they are told. Messages are not for this.
int Enqueue(void* stream, Step step) {
  const std::lock_guard lock(mutex);
  static const bool at_once = std::getenv("STROBE_FAKE_AT_ONCE") != nullptr;
  if (at_once) {
    Stream one;
    one.steps.push_back(std::move(step));
    return Try(one) ? 0 : 719;
  }
  Of(stream).steps.push_back(std::move(step));
  return 0;
}

std::byte* Address(uint64_t number) { return reinterpret_cast<std::byte*>(number); }

// Memory that is allocated. A block ends where one of the 2 MB pages does that callers remember
// (src/cuda/host/device_pointer.h), and behind that is a page that nobody may touch.
struct Block {
  size_t bytes;
  void* mapped;
  size_t mapped_bytes;
};
constexpr size_t kPage = size_t{2} << 20, kAlignment = 256;
std::mutex blocks_mutex;
std::map<uint64_t, Block> blocks;  // by address

bool Allocate(uint64_t* address, size_t bytes) {
  if (bytes == 0) return false;
  bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  const size_t pages = (bytes + kPage - 1) / kPage * kPage, mapped_bytes = pages + 2 * kPage;
  void* const mapped =
      mmap(nullptr, mapped_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return false;
  const uint64_t begin = (reinterpret_cast<uintptr_t>(mapped) + kPage - 1) / kPage * kPage;
  mprotect(Address(begin), pages, PROT_READ | PROT_WRITE);
  *address = begin + pages - bytes;
  const std::lock_guard lock(blocks_mutex);
  blocks[*address] = {bytes, mapped, mapped_bytes};
  return true;
}
bool Free(uint64_t address) {
  const std::lock_guard lock(blocks_mutex);
  const auto found = blocks.find(address);
  if (found == blocks.end()) return false;
  munmap(found->second.mapped, found->second.mapped_bytes);
  blocks.erase(found);
  return true;
}
bool IsAllocated(uint64_t address) {
  const std::lock_guard lock(blocks_mutex);
  auto after = blocks.upper_bound(address);
  if (after == blocks.begin()) return false;
  const auto& [begin, block] = *--after;
  return address < begin + block.bytes;
}

struct Rectangle {
  size_t from_x, from_y;
  unsigned from_kind;
  const void* from_host;
  uint64_t from;
  void* from_array;
  size_t from_pitch, to_x, to_y;
  unsigned to_kind;
  void* to_host;
  uint64_t to;
  void* to_array;
  size_t to_pitch, width, height;
};
struct Id {
  char bytes[128];
};
struct Config {  // ncclConfig_t
  size_t size;
  unsigned magic, version;
  int blocking;
};

}  // namespace

// Another order from now on.
FAKE void fake_seed(uint64_t seed) { state = seed; }
// What ncclCommGetAsyncError says from now on.
FAKE void fake_error(void* comm, int error) { static_cast<Comm*>(comm)->error = error; }
FAKE int fake_aborted(void* comm) { return static_cast<Comm*>(comm)->aborted; }

FAKE int cuInit(unsigned) { return 0; }
FAKE int cuDeviceGetCount(int* count) { return *count = 8, 0; }
FAKE int cuDeviceGet(int* device, int index) { return *device = index, 0; }
FAKE int cuDevicePrimaryCtxRetain(void** context, int device) {
  return *context = reinterpret_cast<void*>(static_cast<intptr_t>(device + 1)), 0;
}
FAKE int cuCtxPushCurrent_v2(void* context) { return context ? 0 : 201; }
FAKE int cuCtxPopCurrent_v2(void** context) { return *context = nullptr, 0; }
FAKE int cuCtxSetCurrent(void*) { return 0; }
FAKE int cuMemAlloc_v2(uint64_t* address, size_t bytes) { return Allocate(address, bytes) ? 0 : 1; }
FAKE int cuMemFree_v2(uint64_t address) { return Free(address) ? 0 : 1; }
FAKE int cuPointerGetAttribute(void* data, unsigned attribute, uint64_t address) {
  if (attribute != 2 || !IsAllocated(address)) return 1;  // CU_POINTER_ATTRIBUTE_MEMORY_TYPE
  return *static_cast<unsigned*>(data) = 2, 0;            // CU_MEMORYTYPE_DEVICE
}
FAKE int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void* stream) {
  return Enqueue(stream, {.to = Address(to), .from = Address(from), .bytes = bytes});
}
FAKE int cuMemcpy2DAsync_v2(const Rectangle* r, void* stream) {
  if (r->from_pitch < r->width || r->to_pitch < r->width) return 1;  // CUDA_ERROR_INVALID_VALUE
  return Enqueue(stream, {.to = Address(r->to),
                          .from = Address(r->from),
                          .to_pitch = r->to_pitch,
                          .from_pitch = r->from_pitch,
                          .bytes = r->width,
                          .lines = r->height});
}
FAKE int cuStreamSynchronize(void* stream) {
  const std::lock_guard lock(mutex);
  while (!Of(stream).steps.empty())
    if (!Advance()) return 719;  // nobody else will do anything: a real one would hang
  return 0;
}
FAKE int cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void* stream) {
  // As with the host's ordinary memory, `from` is read before it returns.
  if (const int error = cuStreamSynchronize(stream)) return error;
  std::memcpy(Address(to), from, bytes);
  return 0;
}
FAKE int cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void* stream) {
  return cuMemcpyDtoDAsync_v2(reinterpret_cast<uintptr_t>(to), from, bytes, stream);
}
FAKE int cuMemsetD8Async(uint64_t to, unsigned char value, size_t bytes, void* stream) {
  if (value != 0) return 1;
  return Enqueue(stream, {.kind = Step::kFill, .to = Address(to), .bytes = bytes});
}
FAKE int cuStreamCreate(void** stream, unsigned flags) {
  return *stream = std::malloc(1), flags == 1 ? 0 : 1;
}
FAKE int cuStreamDestroy_v2(void* stream) {
  const std::lock_guard lock(mutex);
  streams.erase(stream);
  std::free(stream);
  return 0;
}
FAKE int cuStreamQuery(void* stream) {
  const std::lock_guard lock(mutex);
  for (int n = 0; n < 3 && !Of(stream).steps.empty(); ++n) Advance();
  return Of(stream).steps.empty() ? 0 : 600;
}
FAKE int cuStreamWaitEvent(void* stream, void* event, unsigned) {
  auto* const e = static_cast<Event*>(event);
  return Enqueue(stream, {.kind = Step::kWait, .event = e, .number = e->recorded});
}
FAKE int cuEventCreate(void** event, unsigned flags) {
  return *event = new Event, flags == 2 ? 0 : 1;
}
FAKE int cuEventDestroy_v2(void* event) { return delete static_cast<Event*>(event), 0; }
FAKE int cuEventRecord(void* event, void* stream) {
  auto* const e = static_cast<Event*>(event);
  return Enqueue(stream, {.kind = Step::kRecord, .event = e, .number = ++e->recorded});
}
FAKE int cuGetErrorString(int error, const char** text) {
  return *text = error == 719 ? "the streams wait for each other" : "an error of the fake", 0;
}

FAKE const char* ncclGetErrorString(int) { return "an error of the fake NCCL"; }
FAKE int ncclGetUniqueId(char* id) { return std::memset(id, 7, 128), 0; }
FAKE int ncclCommInitAll(void** comms, int count, const int*) {
  auto made = std::make_shared<Group>();
  made->ranks = made->made = count;
  for (int rank = 0; rank < count; ++rank) comms[rank] = new Comm{made, rank};
  return 0;
}
// Of one id ranks are a group, and in progress until all are there; one of 0s is refused.
FAKE int ncclCommInitRankConfig(void** comm, int ranks, Id id, int rank, const Config* config) {
  if (config->size < sizeof *config || config->magic != 0xcafebeef || config->version < 21400 ||
      config->blocking != 0 || rank < 0 || rank >= ranks)
    return 4;
  const std::string name(id.bytes, sizeof id.bytes);
  if (name.find_first_not_of('\0') == std::string::npos) return 5;
  static std::map<std::string, std::shared_ptr<Group>> groups;
  const std::lock_guard lock(mutex);
  std::shared_ptr<Group>& made = groups[name];
  if (!made) made = std::make_shared<Group>();
  made->ranks = ranks;
  ++made->made;
  *comm = new Comm{.group = made, .rank = rank, .blocks = false};
  return 7;
}
FAKE int ncclCommDestroy(void* comm) { return delete static_cast<Comm*>(comm), 0; }
// NCCL frees what it aborts. Of one that has met the others tests look at it afterwards, and free
// it.
FAKE int ncclCommAbort(void* comm) {
  auto* const c = static_cast<Comm*>(comm);
  const std::lock_guard lock(mutex);
  c->aborted = true;
  if (c->group->made < c->group->ranks) delete c;
  return 0;
}
FAKE int ncclCommCount(void* comm, int* count) {
  return *count = static_cast<Comm*>(comm)->group->ranks, 0;
}
FAKE int ncclCommUserRank(void* comm, int* rank) {
  return *rank = static_cast<Comm*>(comm)->rank, 0;
}
FAKE int ncclCommCuDevice(void* comm, int* device) { return ncclCommUserRank(comm, device); }
FAKE int ncclCommGetAsyncError(void* comm, int* error) {
  const auto* const c = static_cast<Comm*>(comm);
  const std::lock_guard lock(mutex);
  return *error = c->group->made < c->group->ranks ? 7 : c->error, 0;
}
FAKE int ncclGroupStart() { return ++depth, 0; }
FAKE int ncclGroupEnd() {
  if (--depth != 0 || group.empty()) return 5;
  Step step{.kind = Step::kMessages};
  void* const stream = group.front().second.second;
  Comm* const comm = group.front().second.first;
  for (auto& [message, where] : group) {
    if (where != group.front().second) return 5;
    step.messages.push_back(std::move(message));
  }
  group.clear();
  {
    const std::lock_guard lock(mutex);
    group_of_stream[stream] = comm->group.get();
  }
  const int error = Enqueue(stream, std::move(step));
  return error == 0 && !comm->blocks ? 7 : error;
}
namespace {
int Message(bool sends, void* data, size_t count, int type, int peer, void* comm, void* stream) {
  auto* const c = static_cast<Comm*>(comm);
  if (type != 0 || peer < 0 || peer >= c->group->ranks || peer == c->rank || depth != 1) return 4;
  const int from = sends ? c->rank : peer, to = sends ? peer : c->rank;
  group.emplace_back(
      std::make_shared<Transfer>(Transfer{sends, static_cast<std::byte*>(data), count, from, to}),
      std::pair(c, stream));
  return 0;
}
}  // namespace
FAKE int ncclSend(const void* data, size_t count, int type, int peer, void* comm, void* stream) {
  return Message(true, const_cast<void*>(data), count, type, peer, comm, stream);
}
FAKE int ncclRecv(void* data, size_t count, int type, int peer, void* comm, void* stream) {
  return Message(false, data, count, type, peer, comm, stream);
}
