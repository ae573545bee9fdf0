import base64
import collections
import io
import os
import pathlib
import pickle
import zipfile
import zlib

import numpy as np
import pytest

from tmlib.data import read_pt
from tmlib.data.slides import SlideFileError, UnsafeFileError, read_slide

# Written by Torch 2: {'features': x[1:, ::2] as float16, 'coords': int64
# [3, 2], 'epoch': 7} in the old format, x = arange(12).reshape(4, 3) / 2 ...
LEGACY = (
  b'c-nnX%SyvQ6wRv-M_cO~cP`_m*fzCfBPdmb@mV*skr0z<6A78#$)uoA=&D%1!4L4)`~<;;la|'
  b'&^aTWt}=G^nRBkdhUKOYz02hX2(`_++l{iVx$2#QH6ilX#66U<|gGoU;PSq!Qqkdpj~LLnmR('
  b'AW>%7_>KnBq(0`)Jeiunt(n8!z4KgCIRCDa#$m}e1)-qJT{1tX|T8l1#G10+_NarE_Fr9rG)A'
  b'U#=W5Gq#}$G<Z$|whLP_G8Yhf9gE|7uG)W=zkW9BnL7$DFOE>C1%rFE7DNBlNHEgTis5M)b-8'
  b'zQcG>z9!Wt#krfWkdiu#UAc6tRZYF|15HSv;biki8Rh%YDkJ-wr*203CK<Rlr&YN+h4jFvk4^'
  b'%7M%i%rjicc8d(_e;I04vtb|EmIaky=Do4--kf=FO@ho~Tfj~ScBfmUedYzQhYQ)R9<yC75mc'
  b'8o)o3-#xb&$1<BPcy<y1LS+N1X9{1;&(iDd'
)
# ... and {'features': x[1:, ::2] as bfloat16, 'w': Parameter(x.T)} as a zip.
ZIP = (
  b'c-oy+J#W)M7(Uynn>v9~NK49qItGcRc50^|sKm067Z0SVkfJWeb*_zt8~2<`3rI*2h(NbajEJ'
  b'AW#?XboP$ULK2P7sY{sMP)+S*RqqMr2XZ0miVd+y%nJy#7b1wc9t28ICgU}LUfVXL_F%+<9VS'
  b'RXRF>?;Hcb&B7F7Vh}4jTjqyzTGUE9qhPm!Svxq$8j4bhOM^eo4X|ev4ui?lwjH<)7pZF3n7B'
  b'0yPk!m@>=*^K&d)I(nK^;=g4gDbP#Xw7>%wPz~BtFhtdXXFg-N3Z`+>hLK{0?t1UeC8_<W1M~'
  b';mJB;2c^3`W@+x)!kQq3h=;+_8LX8)E1SXuL@@HcxZ~vQ9<a2xufU(d3ORMmIw-sUEszFb3B{'
  b'x&0<xa}uMe8oK>Hc*(y*(=~LbQ>+@J>EidpdnLj_qk3)yCcrqUKylOaw=Hb$LcdM+rfZpKAtX'
  b'xo<?rzus))w<bUCm>>H0@*TCTIz+J-HxYfD2*`(L9hQvsDd^oJ!&uonu*fDs~K;{}EuEsw4-V'
  b'BK{vb|K|>yYhRQCt3W39BGj1yK+v{H2}U=W>i(}st4+4m9jkevE0d$yzC_`4^LPmU0c5T_SgG'
  b'_6#%*ws)jtP0L+k3NjxRdC2>IF6NymcVQY0xq^`bD;~1DG8c(Y}Ib7ttKpBrdZaumD{PSRu8X'
  b'(wq8~P4$z)Oqvi|I6UO}^48h)P+K#6_hvUzV223!+k5k|kLd<wZp-E3&vCiHfX*E}8u`)hiGk'
  b'g+L|429@aRjCO=Dp#1C}O5&o{pNL^zGhncLlJKZ;b20c)2p{N{Btz7;nHWQj1yQ>vfl;T%i}i'
  b's8ryftDqTY$4j?Yk15*78wSPa$Wz?sXEuxP>ZG1#{NHrz^8gXiz}^X_u9k*15!KbdfTo(gAzq'
  b'rU{O#)t3WZ8pM(m~@aI=Kce}tW-M'
)
X = np.arange(12, dtype=np.float32).reshape(4, 3) / 2
# name, sums of the first entry and of all entries, by Torch.
CHECKPOINTS = {
  'clam_sb_s_0_checkpoint.pt': (15, (512, 1024), 740.8328308241556),
  'dsmil_c16_aggregator.pth': (8, (1, 512), -2.9583284516775166),
  'dsmil_tcga_aggregator.pth': (8, (2, 512), -1.6890741747774882),
}


def shared():
  default = pathlib.Path(__file__).resolve().parents[4] / 'shared'
  return pathlib.Path(os.environ.get('TMLIB_SHARED', default)) / 'data'


def unpack(path, packed):
  path.write_bytes(zlib.decompress(base64.b85decode(packed)))
  return path


def write_zip(path, payload, storages=None):
  with zipfile.ZipFile(path, 'w') as archive:
    archive.writestr('archive/data.pkl', payload)
    for key, raw in (storages or {}).items():
      archive.writestr(f'archive/data/{key}', raw)
  return path


class Reference:
  """Pickles as a persistent id."""

  def __init__(self, *pid):
    self.pid = pid


class Pickler(pickle.Pickler):
  def persistent_id(self, obj):
    return obj.pid if isinstance(obj, Reference) else None


class Call:
  """Pickles as a call of a function by name."""

  def __init__(self, name, *args):
    self.name, self.args = name, args

  def __reduce__(self):
    return self.name, self.args


def dumps(value):
  file = io.BytesIO()
  Pickler(file, 2).dump(value)
  return file.getvalue()


def test_the_old_format(tmp_path):
  found = read_pt(unpack(tmp_path / 'a.pt', LEGACY))
  np.testing.assert_array_equal(found['features'], X[1:, ::2])
  assert found['features'].dtype == np.float16
  np.testing.assert_array_equal(found['coords'], [[0, 0], [256, 0], [0, 256]])
  assert found['coords'].dtype == np.int64
  assert found['epoch'] == 7
  with pytest.warns(UserWarning, match='pitch of 256'):
    slide = read_slide(tmp_path / 'a.pt')
  assert slide.features.shape == (3, 2)
  assert slide.coords.shape == (3, 2)


@pytest.mark.parametrize('mmap', [False, True])
def test_the_zip_format_with_bfloat16_strides_and_parameters(tmp_path, mmap):
  found = read_pt(unpack(tmp_path / 'a.pt', ZIP), mmap=mmap)
  assert found['features'].dtype.name == 'bfloat16'
  np.testing.assert_array_equal(
    found['features'].astype(np.float32), X[1:, ::2]
  )
  np.testing.assert_array_equal(found['w'], X.T)


@pytest.mark.parametrize('name', CHECKPOINTS)
@pytest.mark.parametrize('mmap', [False, True])
def test_real_checkpoints(name, mmap):
  path = shared() / 'checkpoints' / name
  if not path.exists():
    pytest.skip('no checkpoints in TMLIB_SHARED')
  count, shape, total = CHECKPOINTS[name]
  found = read_pt(path, mmap=mmap)
  assert len(found) == count
  first = next(iter(found.values()))
  assert first.shape == shape
  assert abs(np.sum(first, dtype=np.float64) - total) < 1e-9
  assert all(np.isfinite(x).all() for x in found.values())


@pytest.mark.parametrize(
  ('function', 'arguments', 'word'),
  [
    (os.system, ('touch pwned',), 'posix.system'),
    (eval, ('open("pwned", "w")',), '__builtin__.eval'),
    (getattr, ('x', 'getcwd'), '__builtin__.getattr'),
    (pathlib.Path, ('pwned',), 'pathlib'),
    (collections.Counter, ('a',), 'collections.Counter'),
  ],
)
@pytest.mark.parametrize('kind', ['zip', 'legacy'])
def test_a_malicious_pickle_is_refused_by_name(
  tmp_path, monkeypatch, function, arguments, word, kind
):
  monkeypatch.chdir(tmp_path)
  payload = pickle.dumps(Call(function, *arguments), 2)
  path = tmp_path / 'a.pt'
  if kind == 'zip':
    write_zip(path, payload)
  else:
    path.write_bytes(payload)
  with pytest.raises(UnsafeFileError, match=f'asks for {word}') as error:
    read_pt(path)
  assert 'a.pt' in str(error.value)
  assert [p.name for p in tmp_path.iterdir()] == ['a.pt']


def rebuild(storage, offset, size, stride):
  """A tensor as Torch writes it, over a storage of 6 floats."""
  name = b'ctorch._utils\n_rebuild_tensor_v2\n'
  kind = b'ctorch\nFloatStorage\n'
  # (rebuild, (storage, offset, size, stride, False, None)) by hand.
  body = b'\x80\x02' + name + b'('
  body += b'(X\x07\x00\x00\x00storage' + kind
  body += b'X\x01\x00\x00\x000X\x03\x00\x00\x00cpu' + number(storage) + b'tQ'
  body += number(offset) + b'(' + b''.join(map(number, size)) + b't'
  body += b'(' + b''.join(map(number, stride)) + b't\x89NtR.'
  return body


def number(x):
  return b'J' + int(x).to_bytes(4, 'little', signed=True)


RAW = np.arange(6, dtype='<f4').tobytes()


def test_a_tensor_by_hand(tmp_path):
  path = write_zip(tmp_path / 'a.pt', rebuild(6, 1, (2, 2), (1, 2)), {'0': RAW})
  np.testing.assert_array_equal(read_pt(path), [[1, 3], [2, 4]])


@pytest.mark.parametrize(
  ('arguments', 'storages'),
  [
    ((6, 3, (2, 2), (2, 1)), {'0': RAW}),  # beyond the end
    ((6, 0, (2, 2), (-2, 1)), {'0': RAW}),
    ((6, -1, (2, 2), (2, 1)), {'0': RAW}),
    ((6, 0, (-1, 2), (2, 1)), {'0': RAW}),
    ((6, 0, (2, 2), (2,)), {'0': RAW}),
    ((9, 0, (3, 3), (3, 1)), {'0': RAW}),  # less stored than said
    ((2**30, 0, (3, 3), (3, 1)), {'0': RAW}),
    ((6, 0, (2, 2), (2, 1)), {}),
    ((6, 0, (2**30, 1024), (0, 0)), {'0': RAW}),  # terabytes of one number
  ],
)
def test_no_tensor_reads_outside_its_storage(tmp_path, arguments, storages):
  path = write_zip(tmp_path / 'a.pt', rebuild(*arguments), storages)
  with pytest.raises(SlideFileError, match=r'a\.pt: '):
    read_pt(path)


def test_a_tensor_that_is_to_be_negated_is_not_read_as_it_is(tmp_path):
  plain = rebuild(6, 0, (2, 2), (2, 1))
  lazy = plain.replace(b'\x89NtR.', b'\x89N}X\x03\x00\x00\x00neg\x88stR.')
  path = write_zip(tmp_path / 'a.pt', lazy, {'0': RAW})
  with pytest.raises(SlideFileError, match=r'a\.pt.*resolve_neg'):
    read_pt(path)


def test_sets_are_containers(tmp_path):
  found = read_pt(write_zip(tmp_path / 'a.pt', dumps({'ids': {1, 2}})))
  assert found == {'ids': {1, 2}}


@pytest.mark.parametrize(
  ('content', 'match'),
  [
    (b'', 'neither a zip'),
    (b'PK\x03\x04 cut off', 'truncated'),
    (b'features', 'neither a zip archive nor a pickle'),
    (pickle.dumps([1, 2]), 'no file of torch.save'),
    (b'\x80\x02]q\x00(', 'truncated|readable'),
  ],
)
def test_what_is_no_pt_is_named(tmp_path, content, match):
  path = tmp_path / 'a.pt'
  path.write_bytes(content)
  with pytest.raises(SlideFileError, match=match):
    read_pt(path)


def test_another_zip_and_no_file(tmp_path):
  with zipfile.ZipFile(tmp_path / 'a.pt', 'w') as archive:
    archive.writestr('readme.txt', 'x')
  with pytest.raises(SlideFileError, match=r'without data\.pkl.*readme'):
    read_pt(tmp_path / 'a.pt')
  with pytest.raises(FileNotFoundError, match=r'b\.pt'):
    read_pt(tmp_path / 'b.pt')


def test_what_is_found_inside_names_the_file(tmp_path):
  cycle = []
  cycle.append(cycle)
  objects = np.array(['a', None], object)
  for value, match in ((cycle, 'holds itself'), (objects, 'dtype .O8')):
    with pytest.raises(SlideFileError, match=rf'a\.pt: .*{match}'):
      read_pt(write_zip(tmp_path / 'a.pt', dumps(value)))


def test_a_flipped_bit_in_the_numbers_is_found(tmp_path):
  path = unpack(tmp_path / 'a.pt', ZIP)
  raw = bytearray(path.read_bytes())
  raw[raw.index(X.tobytes()) + 9] ^= 1
  path.write_bytes(raw)
  with pytest.raises(SlideFileError, match='CRC'):
    read_pt(path)
