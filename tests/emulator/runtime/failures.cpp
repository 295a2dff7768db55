// How a launch fails: in words that the launcher gets, and without what the threads were about to do.
#include <cstdarg>
#include <cstdio>

#include "state.h"

namespace emu {
sigjmp_buf failure;

namespace {
std::string message;

void on_signal(int number, siginfo_t* info, void*) {
  const bool trap = number == SIGILL;
  fail("%s at %p", trap ? "misaligned access, or an index beyond its array, in code" : "memory that is nobody's",
       info->si_addr);
}
}  // namespace

void fail(const char* format, ...) {
  char text[512];
  va_list values;
  va_start(values, format);
  vsnprintf(text, sizeof text, format, values);
  va_end(values);
  message = text;
  if (self) {
    snprintf(text, sizeof text, ", by block %u,%u,%u thread %u", self->block_index.x, self->block_index.y,
             self->block_index.z, self->thread_index.x);
    message += text;
  }
  siglongjmp(failure, 1);
}

[[noreturn]] void report_waiting(const char* what) {
  struct Reason {
    const char* words;
    int threads;
    const Fiber* first;
  };
  std::vector<Reason> reasons;
  for (const Block* block : launch->resident)
    for (const Fiber& f : block->fibers) {
      if (!f.waiting_for) continue;
      size_t i = 0;
      while (i < reasons.size() && strcmp(reasons[i].words, f.waiting_for)) i++;
      if (i == reasons.size()) reasons.push_back({f.waiting_for, 0, &f});
      reasons[i].threads++;
    }
  message = what;
  for (const Reason& reason : reasons) {
    char text[256];
    const dim3 block = reason.first->block_index;
    snprintf(text, sizeof text, "; %d threads: %s (the first is block %u,%u,%u thread %u)", reason.threads,
             *reason.words ? reason.words : "run", block.x, block.y, block.z, reason.first->thread_index.x);
    message += text;
  }
  siglongjmp(failure, 1);
}

Signals::Signals() {
  static char stack[64 << 10];  // that of a fiber may be what has overflown
  stack_t alternate = {};
  alternate.ss_size = sizeof stack, alternate.ss_sp = stack;
  sigaltstack(&alternate, nullptr);
  struct sigaction ours = {};
  ours.sa_sigaction = on_signal, ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (int i = 0; i < 3; i++) sigaction(kNumbers[i], &ours, &before[i]);
}
Signals::~Signals() {
  for (int i = 0; i < 3; i++) sigaction(kNumbers[i], &before[i], nullptr);
}

extern "C" const char* emu_message() { return message.c_str(); }
}  // namespace emu
