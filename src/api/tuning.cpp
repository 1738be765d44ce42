#include "api/tuning.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <list>
#include <mutex>
#include <new>
#include <string_view>

#include "core/checks.h"
#include "core/machine.h"
#include "core/team.h"
#include "core/tuning_bucket.h"
#if STROBE_HAVE_CUDA
#include "cuda/host/dispatch.h"
#endif

namespace strobe {

namespace {

// The whole file, or in `error` why not. A pipe is refused, as nobody may ever write to it.
std::string read_file(const char* path, std::string& error) {
  const auto system_error = [&](const char* what) {
    error = format("cannot be %s: %s", what, std::strerror(errno));
    return std::string();
  };
  const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return system_error("opened");
  struct Close {
    int fd;
    ~Close() { close(fd); }
  } const closing{fd};
  struct stat found;
  if (fstat(fd, &found) != 0) return system_error("read");
  if (!S_ISREG(found.st_mode)) {
    error = "is not a regular file";
    return {};
  }
  std::string text;
  char part[4096];
  while (text.size() <= TuningFile::kMostBytes) {
    const ssize_t size = read(fd, part, sizeof part);
    if (size == 0) return text;
    if (size < 0 && errno == EINTR) continue;
    if (size < 0) return system_error("read");
    text.append(part, static_cast<size_t>(size));
  }
  error = format("has more than %zu bytes", TuningFile::kMostBytes);
  return {};
}

// Fills the table, or says why the file is of no use.
std::string read_table(const char* path, TuningFile& table) {
  std::string error;
  const std::string text = read_file(path, error);
  if (!error.empty()) return error;
  error = parse_tuning(text, table);
  if (!error.empty()) return "is no tuning file: " + error;
  if (table.version == strobe_version()) return {};
  return format("is of Strobe %.40s, and this is %s: run `strobe tune` again",
                table.version.c_str(), strobe_version());
}

class Tuning {
 public:
  Tuning() {
    const char* const given = std::getenv("STROBE_TUNING");
    if (given && std::strcmp(given, "0") == 0) {
      ignored_ = "none: STROBE_TUNING = 0";
      return;
    }
    const bool is_named = given && *given;
    const std::string path = is_named ? given : tuning_path_of_user();
    // Most users have none, which is not worth a word.
    if (path.empty() || (!is_named && access(path.c_str(), F_OK) != 0)) return;
    const std::string error = load(path.c_str());
    if (!error.empty()) ignored_ = "none: " + path + " " + error;
  }

  const TuningFile* table() const { return table_.load(std::memory_order_acquire); }

  // "" or why the file is of no use.
  std::string load(const char* path) {
    Loaded loaded{path, {}};
    if (std::string error = read_table(path, loaded.file); !error.empty()) return error;
    const std::lock_guard lock(mutex_);
    all_.push_back(std::move(loaded));
    table_.store(&all_.back().file, std::memory_order_release);
    return {};
  }
  void unload() {
    const std::lock_guard lock(mutex_);
    table_.store(nullptr, std::memory_order_release);
    ignored_ = "none";
  }

  // The path of the table in force, or why there is none.
  std::string where() {
    const std::lock_guard lock(mutex_);
    for (const Loaded& each : all_)
      if (&each.file == table()) return each.path;
    return ignored_;
  }

 private:
  struct Loaded {
    std::string path;
    TuningFile file;
  };
  std::mutex mutex_;
  std::list<Loaded> all_;  // a plan that is being made may read one that another one has replaced
  std::atomic<const TuningFile*> table_{nullptr};
  std::string ignored_ = "none";
};

// Never destroyed: threads may make plans while the process ends.
Tuning& the_tuning() {
  static Tuning& tuning = *new Tuning;
  return tuning;
}

// Whether what was measured on a device counts for this one.
bool is_of(const TunedDevice& tuned, int32_t device, int32_t index) {
  if (device == STROBE_CPU) {
    return tuned.device == "cpu" && !tuned.name.empty() && tuned.name == cpu_features().name;
  }
#if STROBE_HAVE_CUDA
  const auto devices = cuda::devices();
  if (static_cast<size_t>(index) < devices.size()) {
    const cuda::DeviceProperties& found = devices[static_cast<size_t>(index)];
    return tuned.device == "cuda" && tuned.name == found.name &&
           tuned.compute_capability == found.compute_capability;
  }
#else
  static_cast<void>(index);
#endif
  return false;
}

}  // namespace

const TuningFile* tuning_table() { return the_tuning().table(); }

std::optional<Choice> tuned_choice(const TuningFile& table, const AttentionProblem& p) {
  for (const TunedDevice& device : table.devices) {
    if (!is_of(device, p.device, p.device_index)) continue;
    const std::string bucket =
        tuning_bucket(p, p.threads > 0 ? p.threads : static_cast<int>(default_threads()));
    if (bucket.empty()) return {};
    const TunedChoice* const found = device.find(bucket);
    if (!found) return {};
    return Choice{found->kernel, found->instance, found->block};
  }
  return {};
}

Status load_tuning(const char* path) {
  if (!path) {
    the_tuning().unload();
    return {};
  }
  const std::string error = the_tuning().load(path);
  return error.empty() ? Status() : invalid(format("path = %.200s: ", path) + error);
}

std::string describe_tuning() {
  const TuningFile* const table = tuning_table();
  const std::string where = the_tuning().where();
  if (!table) return where;
  size_t here = 0, elsewhere = 0;
  int32_t devices = 0;
#if STROBE_HAVE_CUDA
  devices = static_cast<int32_t>(cuda::devices().size());
#endif
  for (const TunedDevice& tuned : table->devices) {
    bool is_here = is_of(tuned, STROBE_CPU, 0);
    for (int32_t i = 0; i < devices; ++i) is_here |= is_of(tuned, STROBE_CUDA, i);
    (is_here ? here : elsewhere) += tuned.choices.size();
  }
  std::string text = format("%zu choices for this machine", here);
  if (elsewhere > 0) text += format(", %zu for others", elsewhere);
  return text + ": " + where;
}

}  // namespace strobe
