// strobe: exact attention from the command line. This file is the process: its signals, its
// standard streams, its exit code.
#include <fcntl.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>

#include "cli/command_line.h"

namespace {

// A closed standard stream would lend its number to the next file that is opened, and what is meant
// for the stream would land in that file. In its place comes one that nothing can be written to.
void OccupyStandardStreams() {
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (fcntl(fd, F_GETFD) == -1) (void)open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY);
  }
}

}  // namespace

int main(int argc, char** argv) {
  OccupyStandardStreams();
  // A file over the size limit is an error of write, to be reported like any other.
  std::signal(SIGXFSZ, SIG_IGN);
  const strobe::cli::Outcome outcome = strobe::cli::RunCommandLine(argc, argv);
  if (!outcome.error.empty()) std::fprintf(stderr, "%s\n", outcome.error.c_str());
  return outcome.exit_code;
}
