// What -fsanitize=thread calls before each access to memory: here the scheduler is told.
#ifndef K3EMU_CHECKED_H_
#define K3EMU_CHECKED_H_

#define K3EMU_HOOK \
  extern "C" __attribute__((weak, visibility("hidden"), no_sanitize("thread"))) void

#define K3EMU_ACCESS(name, bytes, write)                                              \
  K3EMU_HOOK __tsan_##name##bytes(void* address) {                                    \
    if (k3emu_self) k3emu_self->services->access(k3emu_self, address, bytes, write);  \
  }
#define K3EMU_ACCESSES(bytes)                   \
  K3EMU_ACCESS(read, bytes, false)              \
  K3EMU_ACCESS(write, bytes, true)              \
  K3EMU_ACCESS(unaligned_read, bytes, false)    \
  K3EMU_ACCESS(unaligned_write, bytes, true)
K3EMU_ACCESSES(1)
K3EMU_ACCESSES(2)
K3EMU_ACCESSES(4)
K3EMU_ACCESSES(8)
K3EMU_ACCESSES(16)
#undef K3EMU_ACCESSES
#undef K3EMU_ACCESS

K3EMU_HOOK __tsan_read_range(void* address, unsigned long bytes) {
  if (k3emu_self) k3emu_self->services->access(k3emu_self, address, bytes, false);
}
K3EMU_HOOK __tsan_write_range(void* address, unsigned long bytes) {
  if (k3emu_self) k3emu_self->services->access(k3emu_self, address, bytes, true);
}
// A library that has this is of checked kernels.
extern "C" __attribute__((weak, visibility("default"))) const int k3emu_checked = 1;
K3EMU_HOOK __tsan_init() {}
K3EMU_HOOK __tsan_func_entry(void*) {}
K3EMU_HOOK __tsan_func_exit() {}
#undef K3EMU_HOOK

#endif  // K3EMU_CHECKED_H_
