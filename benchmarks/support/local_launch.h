// Starts ranks on this machine, so that a benchmark needs no launcher: the
// program starts itself again, once per rank, with torchrun's variables set.
//
//   int main(int argc, char** argv) {
//     if (!is_rank()) return launch_local_ranks(2, argv);
//     end_with_launcher();
//     ... init_process_group() ...
//   }
//
// Thread safety: none; main's own thread.

#ifndef BRIGADE_BENCHMARKS_SUPPORT_LOCAL_LAUNCH_H_
#define BRIGADE_BENCHMARKS_SUPPORT_LOCAL_LAUNCH_H_

namespace brigade::benchmarks {

// Whether a launcher, or launch_local_ranks(), started this process as a rank.
bool is_rank();

// From here on, this rank is ended when its launcher is killed.
void end_with_launcher();

// Starts this program `num_ranks` times with the arguments `argv`, serves the
// store that the ranks meet at, and waits for them.  When one fails, the others
// are ended.  Returns an exit code: 0, or that of the first rank to fail.
//
// Errors: std::system_error if a process can't be started.
int launch_local_ranks(int num_ranks, char** argv);

}  // namespace brigade::benchmarks

#endif  // BRIGADE_BENCHMARKS_SUPPORT_LOCAL_LAUNCH_H_
