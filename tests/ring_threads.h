// Ranks that are threads of one process, for tests of strobe::Ring: messages are handed over in
// queues, and a rank that waits for one that does not come fails when its time is over.
#ifndef STROBE_TESTS_RING_THREADS_H_
#define STROBE_TESTS_RING_THREADS_H_

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <string>
#include <strobe/ring.hpp>
#include <thread>
#include <utility>
#include <vector>

namespace strobe_test {

// What all ranks share.
class RankThreads {
 public:
  using Bytes = std::vector<std::byte>;

  explicit RankThreads(int32_t ranks, double seconds = 300) : ranks_(ranks), seconds_(seconds) {}

  int32_t ranks() const { return ranks_; }
  size_t bytes() const { return bytes_; }  // sent by all

  void Put(int32_t from, int32_t to, Bytes message) {
    const std::lock_guard lock(mutex_);
    bytes_ += message.size();
    queues_[{from, to}].push_back(std::move(message));
    changed_.notify_all();
  }
  Bytes Get(int32_t from, int32_t to) {
    std::unique_lock lock(mutex_);
    auto& queue = queues_[{from, to}];
    const auto limit = std::chrono::duration<double>(seconds_);
    if (!changed_.wait_for(lock, limit, [&] { return !queue.empty(); })) {
      throw strobe::Error(
          strobe::Status::kDeviceError,
          "no message of rank " + std::to_string(from) + " came to rank " + std::to_string(to));
    }
    Bytes message = std::move(queue.front());
    queue.pop_front();
    return message;
  }
  bool AllTaken() const {
    for (const auto& entry : queues_)
      if (!entry.second.empty()) return false;
    return true;
  }

  // work(rank) of every rank, at the same time; what each has thrown, "" for nothing.
  template <typename Work>
  std::vector<std::string> Run(const Work& work) {
    std::vector<std::string> errors(static_cast<size_t>(ranks_));
    std::vector<std::thread> threads;
    for (int32_t rank = 0; rank < ranks_; ++rank) {
      threads.emplace_back([&, rank] {
        try {
          work(rank);
        } catch (const std::exception& error) {
          errors[static_cast<size_t>(rank)] = error.what();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    return errors;
  }

 private:
  const int32_t ranks_;
  const double seconds_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::pair<int32_t, int32_t>, std::deque<Bytes>> queues_;
  size_t bytes_ = 0;
};

// What one of them has for its communicator. What is received is there at end(), and not before:
// until then it is NaN. What is sent must be the same at end() as it was at begin().
class ThreadCommunicator : public strobe::Communicator {
 public:
  // gpu: where what is sent and received lies; null: in the host's memory.
  ThreadCommunicator(RankThreads& threads, int32_t rank, const strobe::Gpu* gpu = nullptr)
      : threads_(threads), rank_(rank), gpu_(gpu) {}

  int32_t ranks() const override { return threads_.ranks(); }
  int32_t rank() const override { return rank_; }

  void begin(int lane, std::span<const strobe::RingMessage> sends,
             std::span<const strobe::RingMessage> receives, void* stream) override {
    if (lane < 0 || lane >= kLanes || busy_[lane]) throw std::logic_error("the lane is not free");
    if (sends.empty() && receives.empty()) throw std::logic_error("an exchange of nothing");
    busy_[lane] = true;
    for (const strobe::RingMessage& m : sends) {
      RankThreads::Bytes bytes = Read(m, stream);
      if (bytes.empty()) throw std::logic_error("a message without bytes");
      sent_[lane].push_back({m, bytes});
      threads_.Put(rank_, m.rank, std::move(bytes));
    }
    for (const strobe::RingMessage& m : receives) {
      Write(m, RankThreads::Bytes(m.bytes, std::byte{0xFF}), stream);
      coming_.push_back({lane, m});
    }
  }
  void end(int lane, void* stream) override {
    if (!busy_[lane]) throw std::logic_error("there is no exchange in the lane");
    busy_[lane] = false;
    // In the order in which they were asked for, as one rank's messages to another have one order.
    size_t count = coming_.size();
    while (count > 0 && coming_[count - 1].first != lane) --count;
    for (size_t n = 0; n < count; ++n) {
      const strobe::RingMessage m = coming_.front().second;
      coming_.pop_front();
      const RankThreads::Bytes bytes = threads_.Get(m.rank, rank_);
      if (bytes.size() != m.bytes) throw std::logic_error("a message of another size");
      Write(m, bytes, stream);
    }
    for (const auto& [m, bytes] : sent_[lane]) {
      if (Read(m, stream) != bytes) throw std::logic_error("what is on its way was written to");
    }
    sent_[lane].clear();
  }

 private:
  RankThreads::Bytes Read(const strobe::RingMessage& m, void* stream) const {
    RankThreads::Bytes bytes(m.bytes);
    if (gpu_) {
      gpu_->download(bytes.data(), m.data, m.bytes, stream);
    } else {
      std::memcpy(bytes.data(), m.data, m.bytes);
    }
    return bytes;
  }
  void Write(const strobe::RingMessage& m, const RankThreads::Bytes& bytes, void* stream) const {
    if (gpu_) {
      gpu_->upload(m.data, bytes.data(), m.bytes, stream);
    } else {
      std::memcpy(m.data, bytes.data(), m.bytes);
    }
  }

  RankThreads& threads_;
  int32_t rank_;
  const strobe::Gpu* gpu_;
  bool busy_[kLanes] = {};
  std::deque<std::pair<int, strobe::RingMessage>> coming_;
  std::vector<std::pair<strobe::RingMessage, RankThreads::Bytes>> sent_[kLanes];
};

}  // namespace strobe_test

#endif  // STROBE_TESTS_RING_THREADS_H_
