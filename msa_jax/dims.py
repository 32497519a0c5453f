"""The letters that end every tensor's name: `q_BTNH` has shape [B, T, N, H].

Text and attention
  B  batch rows                              N  query heads
  T  query positions                         K  KV heads (= GQA groups)
  S  key positions                           G  query heads a group, N / K
  D  model width                             H  head width
  I  index width                             C  block size (keys a block)
  J  key blocks, ceil(S / C)                 R  blocks kept per query and KV head
  F  MLP width                               E  vocabulary entries
  O  experts                                 Q  experts chosen for a token

Vision
  V  packed patch sequences                  L  patches a packed sequence
  P  numbers a patch, tp * p * p * channels  M  visual tokens a packed sequence, L / merge^2
  A  axes of a patch coordinate: (t, h, w)   W  vision width

Model
  X  layers stacked for scan                 Z  a chunk of queries inside an op
  U  keys that an op looks at together with such a chunk
  Y  frames of C keys in which a block may start, J + 1
"""
