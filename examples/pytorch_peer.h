// PyTorch's attention, measured by a process of its own: demo_pytorch.py, which is asked over a
// socket. For demo.cpp.
#ifndef STROBE_EXAMPLES_PYTORCH_PEER_H_
#define STROBE_EXAMPLES_PYTORCH_PEER_H_

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cli/measure.h"
#include "cli/terminal.h"

namespace strobe::demo {

class PyTorchPeer {
 public:
  struct Answer {
    cli::Timing timing;
    double bytes = 0;
  };

  PyTorchPeer() = default;
  PyTorchPeer(const PyTorchPeer&) = delete;
  PyTorchPeer& operator=(const PyTorchPeer&) = delete;
  ~PyTorchPeer() { Stop(); }

  // Starts python, the path of a Python that has PyTorch, with the script and its arguments. Wait
  // says when it is ready.
  void Start(const std::string& python, const std::vector<std::string>& arguments) {
    int sockets[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0) return;
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_adddup2(&files, sockets[1], STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&files, sockets[1], STDOUT_FILENO);
    posix_spawn_file_actions_addopen(&files, STDERR_FILENO, "/dev/null", O_WRONLY, 0);

    std::vector<std::string> words = {python};
    words.insert(words.end(), arguments.begin(), arguments.end());
    // What is freed goes back to the system at once, so that resident memory says what is in use.
    std::vector<std::string> variables = {"MALLOC_MMAP_THRESHOLD_=65536"};
    for (char** variable = environ; *variable != nullptr; ++variable)
      variables.emplace_back(*variable);
    if (posix_spawnp(&process_, python.c_str(), &files, nullptr, Pointers(words).data(),
                     Pointers(variables).data()) == 0) {
      socket_ = sockets[0];
    } else {
      process_ = -1;
      close(sockets[0]);
    }
    close(sockets[1]);
    posix_spawn_file_actions_destroy(&files);
  }

  // PyTorch's version once it has been imported. Without a value where that fails or takes longer
  // than `seconds`; then there is no peer any more.
  [[nodiscard]] std::optional<std::string> Wait(double seconds) {
    const std::optional<nlohmann::json> answer = Receive(seconds);
    if (!answer || !answer->contains("version") || !(*answer)["version"].is_string()) {
      Stop();
      return std::nullopt;
    }
    return (*answer)["version"].get<std::string>();
  }

  // Forward, or forward and backward, over so many tokens. Without a value where that fails or
  // takes longer than `seconds`; then there is no peer any more.
  [[nodiscard]] std::optional<Answer> Measure(int64_t tokens, bool backward, double seconds) {
    const std::string question = fmt::format("{} {}\n", tokens, backward ? "both" : "forward");
    // Without MSG_NOSIGNAL a process that has ended would end this one too.
    if (!running() || send(socket_, question.data(), question.size(), MSG_NOSIGNAL) < 0) {
      Stop();
      return std::nullopt;
    }
    const std::optional<nlohmann::json> answer = Receive(seconds);
    for (const char* key : {"best", "median", "runs", "bytes"}) {
      if (!answer || !answer->contains(key) || !(*answer)[key].is_number()) {
        Stop();
        return std::nullopt;
      }
    }
    return Answer{.timing = {.median = (*answer)["median"].get<double>(),
                             .best = (*answer)["best"].get<double>(),
                             .runs = (*answer)["runs"].get<int64_t>()},
                  .bytes = (*answer)["bytes"].get<double>()};
  }

  [[nodiscard]] bool running() const { return process_ > 0; }
  [[nodiscard]] pid_t process() const { return process_; }

  void Stop() {
    if (!running()) return;
    close(socket_);
    kill(process_, SIGKILL);
    while (waitpid(process_, nullptr, 0) < 0 && errno == EINTR) {
    }
    process_ = -1;
    socket_ = -1;
  }

 private:
  static std::vector<char*> Pointers(std::vector<std::string>& words) {
    std::vector<char*> pointers;
    for (std::string& word : words) pointers.push_back(word.data());
    pointers.push_back(nullptr);
    return pointers;
  }

  // The next line that is a JSON object.
  [[nodiscard]] std::optional<nlohmann::json> Receive(double seconds) {
    constexpr size_t kLongest = 4096;
    const cli::Stopwatch watch;
    while (running() && received_.find('\n') == std::string::npos) {
      const double left = seconds - watch.Seconds();
      pollfd waiting = {.fd = socket_, .events = POLLIN, .revents = 0};
      if (left <= 0 || received_.size() > kLongest) return std::nullopt;
      if (poll(&waiting, 1, static_cast<int>(left * 1000) + 1) < 0 && errno != EINTR)
        return std::nullopt;
      if (waiting.revents == 0) continue;
      char bytes[512];
      const ssize_t count = recv(socket_, bytes, sizeof bytes, 0);
      if (count == 0 || (count < 0 && errno != EINTR)) return std::nullopt;
      if (count > 0) received_.append(bytes, static_cast<size_t>(count));
    }
    const size_t end = received_.find('\n');
    if (end == std::string::npos) return std::nullopt;
    nlohmann::json answer = nlohmann::json::parse(received_.substr(0, end), nullptr, false);
    received_.erase(0, end + 1);
    if (!answer.is_object()) return std::nullopt;
    return answer;
  }

  pid_t process_ = -1;
  int socket_ = -1;
  std::string received_;
};

}  // namespace strobe::demo

#endif  // STROBE_EXAMPLES_PYTORCH_PEER_H_
