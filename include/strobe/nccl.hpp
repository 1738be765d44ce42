// Ranks that NCCL connects: strobe::Communicator, what a ring (ring.hpp) asks of whoever carries
// its messages, and strobe::NcclCommunicator, which does it with the caller's ncclComm_t. libnccl
// is opened when the program runs; NCCL's header is not needed. ring.hpp includes this.
#ifndef STROBE_NCCL_HPP_
#define STROBE_NCCL_HPP_

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <string>
#include <strobe/formatted.hpp>
#include <strobe/gpu.hpp>
#include <strobe/strobe.hpp>
#include <thread>
#include <utility>

namespace strobe {
inline namespace v0 {

// Bytes that go to a rank, or come from it.
struct RingMessage {
  void* data = nullptr;  // where they lie, or will
  size_t bytes = 0;      // the same on both sides
  int32_t rank = 0;      // whose the other side is
};

// Ranks, numbered from 0, and messages between them. An object is one rank's, and is used by one
// thread at a time.
//
// Messages go in exchanges, each of which is in one of two lanes: begin() starts one and end()
// waits for it, and between the two another one may be on its way in the other lane. From a rank to
// another, messages arrive in the order in which they were sent: exchange after exchange, and in
// the order of the lists. An implementation of one's own (MPI, UCX, a test's threads) throws Error
// where a message does not come in the time that it grants.
class Communicator {
 public:
  // How many exchanges may be on their way: one of keys and one of gradients.
  static constexpr int kLanes = 2;

  Communicator() = default;                               // for those that implement it
  Communicator(const Communicator&) = delete;             // a rank is one
  Communicator& operator=(const Communicator&) = delete;  // a rank is one
  virtual ~Communicator() = default;                      // when no exchange is on its way

  // How many there are.
  [[nodiscard]] virtual int32_t ranks() const = 0;
  // Which one this is.
  [[nodiscard]] virtual int32_t rank() const = 0;
  // Starts an exchange, when what was enqueued in the stream before is done: that wrote what is
  // sent, and read what stood where it is received. Does not wait, neither for others nor on the
  // GPU. Nobody may write to what is sent, or look at what is received, until end().
  virtual void begin(int lane, std::span<const RingMessage> sends,
                     std::span<const RingMessage> receives, void* stream) = 0;
  // What is enqueued in the stream from now on waits for the exchange. On the CPU, where there is
  // no stream, the caller waits.
  virtual void end(int lane, void* stream) = 0;
};

// A ring of one rank, which sends nothing: for programs that run on one device too.
class OneRank : public Communicator {
 public:
  [[nodiscard]] int32_t ranks() const override { return 1; }
  [[nodiscard]] int32_t rank() const override { return 0; }
  void begin(int, std::span<const RingMessage>, std::span<const RingMessage>, void*) override {}
  void end(int, void*) override {}
};

// A rank that sends nothing, and receives whatever lies in its workspace: for one launch of each of
// its passes before there are messages. That loads the kernels of these passes, on GPUs that wait
// for nobody; the results are nothing, and the launches that follow write them anew.
//
//   strobe::Rehearsal nobody(ranks.ranks(), ranks.rank());
//   layer.forward(args, nobody);
class Rehearsal : public Communicator {
 public:
  // As the communicator has them that the launches after it are given.
  Rehearsal(int32_t ranks, int32_t rank) : ranks_(ranks), rank_(rank) {}

  [[nodiscard]] int32_t ranks() const override { return ranks_; }
  [[nodiscard]] int32_t rank() const override { return rank_; }
  void begin(int, std::span<const RingMessage>, std::span<const RingMessage>, void*) override {}
  void end(int, void*) override {}

 private:
  int32_t ranks_, rank_;
};

namespace internal {

// Asks until it is done, now and then; false: it was not within so many seconds.
template <typename Done>
bool within(double seconds, const Done& done) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  while (!done()) {
    const double past = std::chrono::duration<double>(Clock::now() - begin).count();
    if (past > seconds) return false;
    if (past > 1e-3) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

}  // namespace internal

// NCCL's functions, of the library (2.14 or newer) that is opened when an object is made. Numbers
// are ncclResult_t, 0: done. A communicator (ncclComm_t) is a pointer.
class Nccl {
 public:
  // ncclUniqueId: what ranks of several processes meet by.
  struct UniqueId {
    std::array<char, 128> bytes;  // rank 0's unique_id() has made them, and the others got them
  };

  // library: the file, as dlopen takes it. One that the process has loaded already (PyTorch's) is
  // found by this name, wherever it lies. Throws Error, kDeviceError, where it cannot be opened.
  explicit Nccl(const char* library = "libnccl.so.2") : library_(library) {
    library_.find("ncclGetErrorString", error_text_);
    library_.find("ncclGetUniqueId", unique_id_);
    library_.find("ncclCommInitAll", init_all_);
    library_.find("ncclCommInitRankConfig", init_rank_);
    library_.find("ncclCommDestroy", destroy_);
    library_.find("ncclCommAbort", abort_);
    library_.find("ncclCommCount", count_);
    library_.find("ncclCommUserRank", rank_);
    library_.find("ncclCommCuDevice", device_);
    library_.find("ncclCommGetAsyncError", async_error_);
    library_.find("ncclGroupStart", group_start_);
    library_.find("ncclGroupEnd", group_end_);
    library_.find("ncclSend", send_);
    library_.find("ncclRecv", receive_);
    if (library_.reason().empty()) return;
    throw Error(Status::kDeviceError,
                internal::formatted("no NCCL, which carries messages between GPUs: %s: %s", library,
                                    library_.reason().c_str()));
  }

  // Communicators of GPUs of this process, one for each: devices has their numbers, comms gets as
  // many. Throws Error.
  void init_all(std::span<void*> comms, std::span<const int> devices) const {
    if (comms.size() != devices.size()) {
      throw Error(Status::kInvalidArgument,
                  internal::formatted("comms.size() = %zu, expected devices.size() = %zu",
                                      comms.size(), devices.size()));
    }
    expect(init_all_(comms.data(), static_cast<int>(comms.size()), devices.data()),
           "ncclCommInitAll");
  }
  // An id for a new group of ranks. Throws Error.
  [[nodiscard]] UniqueId unique_id() const {
    UniqueId id = {};
    expect(unique_id_(&id), "ncclGetUniqueId");
    return id;
  }
  // The communicator of a rank: the GPU is the one that is current in CUDA's runtime. It does not
  // block, so that no rank waits without a limit for one that is gone: here for so many seconds at
  // most, and at the first messages for those of NcclCommunicator. Throws Error.
  [[nodiscard]] void* init_rank(int ranks, const UniqueId& id, int rank,
                                double seconds = 600) const {
    void* comm = nullptr;
    const Config config;
    const int begun = init_rank_(&comm, ranks, id, rank, &config);
    if (begun != kInProgress) expect(begun, "ncclCommInitRankConfig");
    try {
      if (!internal::within(seconds, [&] { return async_error(comm) != kInProgress; })) {
        throw Error(Status::kDeviceError,
                    internal::formatted("rank %d of %d has not met the others after %g seconds: "
                                        "another rank is late or gone",
                                        rank, ranks, seconds));
      }
      expect(async_error(comm), "ncclCommInitRankConfig");
    } catch (...) {
      abort_(comm);
      throw;
    }
    return comm;
  }
  // Ends a communicator whose work is done. Throws Error.
  void destroy(void* comm) const {
    const int ended = destroy_(comm);
    if (ended != kInProgress) expect(ended, "ncclCommDestroy");
  }

 private:
  friend class NcclCommunicator;

  static constexpr int kInProgress = 7, kBytes = 0;  // ncclInProgress, ncclInt8

  // ncclConfig_t as NCCL 2.14 has it. What newer ones have behind it is then not said.
  struct Config {
    size_t size = sizeof(Config);
    unsigned magic = 0xcafebeef;
    unsigned version = 21400;
    int blocking = 0;
  };

  [[nodiscard]] int async_error(void* comm) const {
    int error = 0;
    expect(async_error_(comm, &error), "ncclCommGetAsyncError");
    return error;
  }
  void expect(int result, const char* what) const {
    if (result == 0) return;
    throw Error(Status::kDeviceError,
                internal::formatted("%s: NCCL says: %s", what, error_text_(result)));
  }

  internal::OpenLibrary library_;
  const char* (*error_text_)(int) = nullptr;
  int (*unique_id_)(UniqueId*) = nullptr;
  int (*init_all_)(void**, int, const int*) = nullptr;
  int (*init_rank_)(void**, int, UniqueId, int, const Config*) = nullptr;
  int (*destroy_)(void*) = nullptr;
  int (*abort_)(void*) = nullptr;
  int (*count_)(void*, int*) = nullptr;
  int (*rank_)(void*, int*) = nullptr;
  int (*device_)(void*, int*) = nullptr;
  int (*async_error_)(void*, int*) = nullptr;
  int (*group_start_)() = nullptr;
  int (*group_end_)() = nullptr;
  int (*send_)(const void*, size_t, int, int, void*, void*) = nullptr;
  int (*receive_)(void*, size_t, int, int, void*, void*) = nullptr;
};

// A rank of an ncclComm_t, which stays the caller's. Messages travel in a stream of this object's
// own, by ncclSend and ncclRecv alone, while the caller's stream computes; events order the two.
// Ranks of one process need a thread each: they wait for each other when NCCL connects them, at
// their first messages. A kernel is loaded at its first launch, for which a GPU may have to be idle
// that waits for another: such a process rehearses (Rehearsal) on all GPUs before the first message
// of any. An object loads its GPU's first kernel when it is made. Memory, too, is allocated before
// a rank's first message and freed after its last.
//
// A launch is enqueued and not waited for, so that a rank which is gone shows later: wait() returns
// when all is done, and throws where NCCL has seen an error or the time is over. Whatever throws
// here has ended the ncclComm_t before (ncclCommAbort), for on the GPU something may hang that not
// even memory can be given back under: aborted() says so, and nobody may destroy it then.
class NcclCommunicator : public Communicator {
 public:
  // comm: an ncclComm_t. seconds: what a communicator that does not block (ncclConfig_t, blocking =
  // 0) may take for an exchange to be enqueued. Throws Error.
  explicit NcclCommunicator(void* comm, double seconds = 600, Nccl nccl = Nccl())
      : nccl_(std::move(nccl)), comm_(comm), seconds_(seconds), gpu_(device_of(nccl_, comm)) {
    nccl_.expect(nccl_.count_(comm, &ranks_), "ncclCommCount");
    nccl_.expect(nccl_.rank_(comm, &rank_), "ncclCommUserRank");
    stream_ = gpu_.make_stream();
    for (void*& event : events_) event = gpu_.make_event();
    load_kernels();
  }
  // The ncclComm_t stays, unless it was aborted.
  ~NcclCommunicator() override {
    try {
      for (void* const event : events_) {
        if (event) gpu_.destroy_event(event);
      }
      if (stream_) gpu_.destroy_stream(stream_);
    } catch (const std::exception&) {  // the GPU is not there any more, nor are they
    }
  }

  [[nodiscard]] int32_t ranks() const override { return ranks_; }
  [[nodiscard]] int32_t rank() const override { return rank_; }
  // The GPU whose rank this is.
  [[nodiscard]] const Gpu& gpu() const noexcept { return gpu_; }

  void begin(int lane, std::span<const RingMessage> sends, std::span<const RingMessage> receives,
             void* stream) override {
    or_abort([&] {
      check();
      gpu_.record(events_[kLanes], stream);
      gpu_.wait(stream_, events_[kLanes]);
      enqueue(sends, receives);
      gpu_.record(events_[static_cast<size_t>(lane)], stream_);
    });
  }
  void end(int lane, void* stream) override {
    or_abort([&] { gpu_.wait(stream, events_[static_cast<size_t>(lane)]); });
  }

  // Returns when all messages and what is enqueued in the stream are done. Throws Error,
  // kDeviceError: what NCCL has seen (a rank that is gone, a link that is down), what a launch ran
  // into, and where it takes longer than so many seconds.
  void wait(void* stream, double seconds) {
    or_abort([&] {
      until(seconds, [&] {
        check();
        return gpu_.done(stream_) && gpu_.done(stream);
      });
    });
  }
  // Ends what hangs, and the ncclComm_t with it, as an error does: for a rank that gives up.
  void abort() noexcept {
    if (comm_) nccl_.abort_(std::exchange(comm_, nullptr));
  }
  // Whether the ncclComm_t has ended so.
  [[nodiscard]] bool aborted() const noexcept { return comm_ == nullptr; }

 private:
  // The first launch on a GPU loads the library's kernels.
  void load_kernels() const {
    const GpuMemory numbers(gpu_, 2 * sizeof(float));
    strobe_add_args a = {};
    a.struct_size = sizeof a;
    a.device = STROBE_CUDA;
    a.device_index = gpu_.index();
    a.out_dtype = STROBE_FLOAT32;
    a.batch = a.seqlen = a.heads = a.head_dim = 1;
    a.x = numbers.floats();
    a.out = numbers.floats() + 1;
    a.stream = stream_;
    static_cast<void>(strobe_add(&a));  // a library without kernels for GPUs has none to load
    gpu_.synchronize(stream_);
  }

  [[nodiscard]] static int32_t device_of(const Nccl& nccl, void* comm) {
    if (comm == nullptr)
      throw Error(Status::kInvalidArgument, "comm = null, expected an ncclComm_t");
    int device = 0;
    nccl.expect(nccl.device_(comm, &device), "ncclCommCuDevice");
    return device;
  }
  template <typename Work>
  void or_abort(const Work& work) {
    try {
      work();
    } catch (...) {
      abort();
      throw;
    }
  }
  // Throws what NCCL has seen.
  void check() const {
    const int error = async_error();
    if (error != Nccl::kInProgress) nccl_.expect(error, "messages of the ring");
  }
  void enqueue(std::span<const RingMessage> sends, std::span<const RingMessage> receives) const {
    nccl_.expect(nccl_.group_start_(), "ncclGroupStart");
    int failed = 0;  // a group is ended whatever went wrong in it
    for (const RingMessage& m : sends) {
      if (failed == 0)
        failed = started(nccl_.send_(m.data, m.bytes, Nccl::kBytes, m.rank, comm_, stream_));
    }
    for (const RingMessage& m : receives) {
      if (failed == 0)
        failed = started(nccl_.receive_(m.data, m.bytes, Nccl::kBytes, m.rank, comm_, stream_));
    }
    const int ended = nccl_.group_end_();
    nccl_.expect(failed, "ncclSend or ncclRecv");
    if (ended == Nccl::kInProgress) {
      until(seconds_, [this] { return async_error() != Nccl::kInProgress; });
      check();
    } else {
      nccl_.expect(ended, "ncclGroupEnd");
    }
  }
  // In a group a communicator that does not block may say that it has only begun.
  [[nodiscard]] static int started(int result) { return result == Nccl::kInProgress ? 0 : result; }
  [[nodiscard]] int async_error() const {
    if (comm_ == nullptr) throw Error(Status::kDeviceError, "the ring's communicator was aborted");
    return nccl_.async_error(comm_);
  }
  template <typename Done>
  void until(double seconds, const Done& done) const {
    if (internal::within(seconds, done)) return;
    throw Error(Status::kDeviceError,
                internal::formatted("rank %d of %d is not done after %g seconds: another rank is "
                                    "late, gone, or has made another call",
                                    rank_, ranks_, seconds));
  }

  Nccl nccl_;
  void* comm_;
  double seconds_;
  Gpu gpu_;
  int ranks_ = 0, rank_ = 0;
  void* stream_ = nullptr;
  // Of each lane's end, and of what an exchange waits for.
  std::array<void*, kLanes + 1> events_ = {};
};

}  // namespace v0
}  // namespace strobe

#endif  // STROBE_NCCL_HPP_
